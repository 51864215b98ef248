"""Prompts from a file: what a line may be, and what an error names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2moe.engine.prompt_file import PromptFileError, read_prompts

SECRET = "a private matter"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_lines_are_text_or_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    conversation = [{"role": "system", "content": "Be brief."}, *user("Hi\nthere")]
    lines = [
        "\ufeff What is a river? ",
        "",
        '{"prompt": "two\\nlines"}',
        json.dumps({"model": "any", "messages": conversation, "temperature": 1}),
        "   ",
        '"quoted"',
        "[1, 2]",
        "Grüße 🌊",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    prompts = read_prompts(path)
    assert [(each.place.removeprefix(f"{path}:"), json.loads(each.messages_json)) for each in prompts] == [
        ("1", user("What is a river?")),
        ("3", user("two\nlines")),
        ("4", conversation),
        ("6", user('"quoted"')),
        ("7", user("[1, 2]")),
        ("8", user("Grüße 🌊")),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "malformed|truncated"),
        (b'{"prompt": "%b"' % SECRET.encode(), "malformed|truncated"),
        (b"{" * 100_000, "."),
        (b"\xff\xfe", "not UTF-8"),
        (b"{}", "either `prompt` or `messages`"),
        (b'{"text": "%b"}' % SECRET.encode(), "either `prompt` or `messages`"),
        (b'{"prompt": "x", "messages": []}', "either `prompt` or `messages`"),
        (b'{"prompt": 1}', "`prompt` is not a text"),
        (b'{"prompt": ""}', "`prompt` is not a text"),
        (b'{"messages": []}', "`messages` is not a list"),
        (b'{"messages": "%b"}' % SECRET.encode(), "`messages` is not a list"),
        (b'{"messages": ["%b"]}' % SECRET.encode(), r"messages\[0\]` has a role other"),
        (
            b'{"messages": [{"role": "user", "content": "a"}, {"role": "%b", "content": ""}]}'
            % SECRET.encode(),
            r"messages\[1\]` has a role other",
        ),
        (b'{"messages": [{"role": "user", "content": ["%b"]}]}' % SECRET.encode(), "no `content`"),
        (b'{"messages": [{"role": ["user"], "content": "x"}]}', "has a role other"),
    ],
)
def test_errors_name_file_and_line_but_no_text(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"fine\n\n" + line + b"\nfine\n")
    with pytest.raises(PromptFileError, match=reason) as refused:
        read_prompts(path)
    message = str(refused.value)
    assert message.startswith(f"{path}:3: ")
    assert "\n" not in message
    assert SECRET not in message


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    with pytest.raises(PromptFileError, match="No such file"):
        read_prompts(path)
    with pytest.raises(PromptFileError, match="directory"):
        read_prompts(tmp_path)
    path.write_text("\n \n")
    with pytest.raises(PromptFileError, match="has no prompts"):
        read_prompts(path)


@given(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1))
def test_any_text_survives_as_json(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text(json.dumps({"prompt": text}), encoding="utf-8")
    assert json.loads(read_prompts(path)[0].messages_json) == user(text)

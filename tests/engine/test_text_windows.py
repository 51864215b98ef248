"""Texts and their windows."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from s2moe.engine.text_windows import TextError, cut, read_text

BOS = 1


class FakeTokenizer:
    """A token per character, and a BOS where the vocabulary has one."""

    def __init__(self, *, add_bos: bool) -> None:
        self.vocab = object()
        self.llama_cpp = SimpleNamespace(
            llama_vocab_get_add_bos=lambda _vocab: add_bos, llama_vocab_bos=lambda _vocab: BOS
        )
        self._prefix = [BOS] if add_bos else []

    def tokenize(self, text: str) -> list[int]:
        return self._prefix + [ord(character) for character in text]


def test_windows_are_whole_and_in_order() -> None:
    text = "abcdefghijklmnopqrstuvwxyz" * 2
    windows = cut(FakeTokenizer(add_bos=False), Path("t"), text, n_tokens=50, window_tokens=16)
    assert [bytes(window.tokens).decode() for window in windows] == [text[:16], text[16:32], text[32:48]]
    assert {window.n_prompt for window in windows} == {2}
    assert {window.n_scored for window in windows} == {13}


def test_each_window_begins_with_a_bos() -> None:
    windows = cut(FakeTokenizer(add_bos=True), Path("t"), "x" * 63, n_tokens=100, window_tokens=32)
    assert [window.tokens for window in windows] == [[BOS] + [ord("x")] * 31] * 2


def test_a_short_text_is_refused_by_name() -> None:
    with pytest.raises(TextError, match="t has 31 tokens, which do not fill one window of 32"):
        cut(FakeTokenizer(add_bos=False), Path("t"), "x" * 31, n_tokens=100, window_tokens=32)


def test_a_long_text_is_read_to_the_last_whole_character(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("aé€")
    assert [read_text(path, size) for size in (1, 2, 3, 5, 6, 99)] == ["a", "a", "aé", "aé", "aé€", "aé€"]


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    cases = {
        "none": (None, "none cannot be read: No such file or directory"),
        "empty": (b" \n", "empty is empty"),
        "binary": (b"text \xff\xfe", "binary: not UTF-8 text"),
        "cut": ("é".encode()[:1], "cut: not UTF-8 text"),
    }
    for name, (data, reason) in cases.items():
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(TextError, match=reason):
            read_text(path, 100)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TextError, match="not a regular file"):
        read_text(tmp_path / "pipe", 100)

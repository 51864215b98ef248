"""Every template that the pinned llama.cpp ships: what works, works; what does not, says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from s2moe.engine.native import Library, NativeError, Status

from chat_rig import SHIPPED, TIME, WEATHER, apply, parse

TEMPLATES = sorted(path.stem for path in SHIPPED.glob("*.jinja")) or ["none"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [WEATHER, TIME], "parallel_tool_calls": True},
    "required": {"tools": [WEATHER, TIME], "tool_choice": "required"},
    "schema": {"json_schema": SCHEMA},
    "tools and schema": {"tools": [WEATHER], "json_schema": SCHEMA},
}
UNSUPPORTED = {
    ("Kimi-K3", "tools and schema"),
    ("inclusionai-ling-3.0-flash", "tools and schema"),
    ("meetkai-functionary-medium-v3.2", "tools and schema"),
}


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_template(library: Library, template: str, request_name: str) -> None:
    if template == "none":
        pytest.skip(f"{SHIPPED} is missing: `make setup` unpacks llama.cpp")
    source = (SHIPPED / f"{template}.jinja").read_text()
    options = REQUESTS[request_name] | {"enable_thinking": False}
    if (template, request_name) in UNSUPPORTED:
        with pytest.raises(NativeError) as caught:
            apply(library, source, **options)
        assert caught.value.status == Status.UNSUPPORTED
        return
    chat_json = apply(library, source, **options)
    chat = json.loads(chat_json)
    if request_name != "plain" and request_name != "tools":
        assert chat["grammar"]
        assert not chat["grammar_lazy"]
    if "tools" in options:
        assert "get_weather" in chat["prompt"]
    said = '{"a": "b"}' if "json_schema" in options else "Hello there, you."
    answer = parse(library, chat_json, [said])
    assert parse(library, chat_json, said) == answer
    # some begin with reasoning though none is wanted
    assert (answer.content or answer.reasoning).strip() == said
    assert answer.calls == []

"""Example bodies for the OpenAPI document: each one is answered with 200 by a model that can do it."""

from __future__ import annotations

from typing import Any, Final

_USER: Final = {"role": "user", "content": "How warm is it in Paris?"}
_CITY: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_WEATHER: Final = {"name": "get_weather", "description": "How warm it is in a city.", "parameters": _CITY}
_TOOL: Final = {"type": "function", "function": _WEATHER}
_CALL: Final = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}

EXAMPLES: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "ChatRequest": {
        "A question": {"messages": [_USER]},
        "As a stream": {
            "messages": [{"role": "system", "content": "Be brief."}, _USER],
            "max_tokens": 64,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "With tools": {"messages": [_USER], "tools": [_TOOL], "tool_choice": "auto"},
        "With the result of a call": {
            "messages": [
                _USER,
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
            ],
            "tools": [_TOOL],
        },
        "Of a given form": {
            "messages": [{"role": "user", "content": "Name a city."}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY}},
        },
        "Two answers with log probabilities": {
            "messages": [_USER],
            "max_tokens": 16,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
        },
    },
    "CompletionRequest": {
        "A text to continue": {"prompt": "Once upon a time", "max_tokens": 32},
        "As a stream": {"prompt": "Once upon a time", "max_tokens": 32, "stream": True},
    },
    "ResponsesRequest": {
        "A question": {"input": "How warm is it in Paris?"},
        "As a stream": {"input": "How warm is it in Paris?", "max_output_tokens": 64, "stream": True},
        "With tools": {
            "input": [_USER],
            "instructions": "Be brief.",
            "tools": [{"type": "function", **_WEATHER}],
        },
        "With log probabilities": {
            "input": "How warm is it in Paris?",
            "max_output_tokens": 16,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        },
    },
    "MessagesRequest": {
        "A question": {"max_tokens": 64, "messages": [_USER]},
        "As a stream": {"max_tokens": 64, "messages": [_USER], "stream": True},
        "With tools": {
            "max_tokens": 64,
            "messages": [_USER],
            "tools": [{"name": "get_weather", "description": "How warm it is.", "input_schema": _CITY}],
        },
    },
    "CountTokensRequest": {"A question": {"messages": [_USER]}},
    "EmbeddingsRequest": {"Two texts": {"input": ["a river", "a lake"]}},
    "TokenizeRequest": {"A text": {"content": "Hello!", "with_pieces": True}},
    "DetokenizeRequest": {"Tokens": {"tokens": [1, 2, 3]}},
}
"""By class of the body and title."""

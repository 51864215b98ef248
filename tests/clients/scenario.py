"""What the scripted engine answers to the prompts of cases.json, and what each client should have seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fake_engine import Action
from scripted_answers import answer, answer_with_calls

from s2moe.engine.messages import Failed, Generate
from s2moe.server.errors import QueueFullError

CASES_PATH = Path(__file__).with_name("cases.json")
CASES: dict[str, Any] = json.loads(CASES_PATH.read_text())
PROMPTS: dict[str, str] = CASES["prompts"]

GREETING = 'Hello, llama 🦙!\nÇa va? 你好 <b>"quoted"</b>'
THOUGHT = "The user wants me to think. Done."
CONCLUSION = "So be it."
PARIS = ("get_weather", {"city": "Paris"})
ROME = ("get_weather", {"city": "Rome"})
WEATHER = "It is 21 °C in Paris."
PERSON = {"name": "Ada", "age": 36}
N_PROMPT_TOKENS, N_CACHED_TOKENS, N_COMPLETION_TOKENS = 10, 4, 7
N_CTX, N_TOO_LONG = 8, 9


def play(request: Generate) -> Sequence[Action]:
    """The script: tells requests apart by the last message of the user."""
    messages = json.loads(request.messages_json)
    asked = next(each["content"] for each in reversed(messages) if each["role"] == "user")
    prompt = next((name for name, text in PROMPTS.items() if text in asked), "chat")
    tools = [tool["function"]["name"] for tool in json.loads(request.chat_options_json).get("tools", [])]
    end = {"cached": N_CACHED_TOKENS, "tokens": N_COMPLETION_TOKENS}
    match prompt:
        case "reasoning":
            return answer(request, CONCLUSION, reasoning=THOUGHT, reasoning_tokens=3, **end)
        case "one_call" | "two_calls" if messages[-1]["role"] == "tool":
            return answer(request, WEATHER, **end)
        case "one_call":
            return answer_with_calls(request, PARIS, **end)
        case "two_calls":
            return answer_with_calls(request, PARIS, ROME, **end)
        case "schema":
            # some clients ask for a schema by a tool of that name
            if tools and "get_weather" not in tools:
                return answer_with_calls(request, (tools[0], PERSON), **end)
            return answer(request, json.dumps(PERSON), **end)
        case "too_long":
            failed = Failed(
                request_id=request.request_id,
                code="context_length_exceeded",
                message="",
                n_prompt_tokens=N_TOO_LONG,
                n_ctx=N_CTX,
            )
            return [failed]
        case "busy":
            return [QueueFullError(16, 1)]
        case _:
            return answer(request, GREETING, **end)


class BusyOnce:
    """`play`, but the first request with the prompt `busy_once` is refused as the queue would refuse it."""

    def __init__(self) -> None:
        self.n_refused = 0

    def __call__(self, request: Generate) -> Sequence[Action]:
        if PROMPTS["busy_once"] in request.messages_json.decode() and self.n_refused == 0:
            self.n_refused += 1
            return [QueueFullError(16, 1)]
        return play(request)

"""How models of each family write an answer: scripted output for the tests of templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Family:
    template: str
    """Name of the file."""
    call: Callable[[int, str, Arguments], str]
    calls: tuple[str, str, str] = ("", "\n", "")
    """Before, between and behind calls."""
    thought: tuple[str, str] | None = None
    """Before and behind reasoning; None: the family has none."""
    content: tuple[str, str] = ("", "")
    """Before and behind content."""
    content_before_calls: tuple[str, str] | None = ("", "\n")
    """Before and behind content that calls follow; None: there is none."""
    parallel: bool = True
    ids: Callable[[int, str], str] | None = None
    """The id that the family writes before the arguments of a call."""
    options: dict[str, Any] = field(default_factory=dict)
    markup: tuple[str, ...] = ()
    """Texts that must appear in no content."""

    def answer(
        self, content: str = "", reasoning: str = "", calls: list[tuple[str, Arguments]] | None = None
    ) -> str:
        text = ""
        if self.thought is not None:
            text += (
                self.thought[0] + reasoning + self.thought[1] if reasoning or self.is_thinking_open else ""
            )
        if not calls:
            return text + self.content[0] + content + self.content[1]
        if content:
            assert self.content_before_calls is not None
            text += self.content_before_calls[0] + content + self.content_before_calls[1]
        written = self.calls[1].join(self.call(i, name, args) for i, (name, args) in enumerate(calls))
        return text + self.calls[0] + written + self.calls[2]

    @property
    def is_thinking_open(self) -> bool:
        """Whether the prompt already begins the reasoning."""
        return self.thought is not None and not self.thought[0]


def _json_call(start: str, end: str, arguments: str = "arguments") -> Callable[[int, str, Arguments], str]:
    return lambda _, name, args: f'{start}{{"name": "{name}", "{arguments}": {json.dumps(args)}}}{end}'


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _xml(parameter: str, start: str, end: str) -> Callable[[int, str, Arguments], str]:
    def call(_: int, name: str, args: Arguments) -> str:
        return start.format(name) + "".join(parameter.format(k, _value(v)) for k, v in args.items()) + end

    return call


def _mistral_id(index: int) -> str:
    return f"abcdef{index:03}"


BAR = "\uff5c"


def _token(name: str) -> str:
    return f"<{BAR}{name}{BAR}>"


HERMES = _json_call("<tool_call>\n", "\n</tool_call>")
THINK = ("<think>\n", "\n</think>\n\n")
OPEN_THINK = ("", "\n</think>\n\n")
TAGS = (
    "<tool_call",
    "</tool_call",
    "<think",
    "</think",
    "<|",
    "|>",
    f"<{BAR}",
    f"{BAR}>",
    "[TOOL_CALLS]",
    "[THINK]",
)
R1_CALLS = (_token("tool▁calls▁begin"), "\n", _token("tool▁calls▁end"))


def _deepseek_call(_: int, name: str, args: Arguments) -> str:
    begin, end = _token("tool▁call▁begin"), _token("tool▁call▁end")
    return f"{begin}{name}{_token('tool▁sep')}{json.dumps(args)}{end}"


def _r1_call(_: int, name: str, args: Arguments) -> str:
    begin, end = _token("tool▁call▁begin"), _token("tool▁call▁end")
    return f"{begin}function{_token('tool▁sep')}{name}\n```json\n{json.dumps(args)}\n```{end}"


FAMILIES: dict[str, Family] = {
    "qwen3": Family("Qwen-Qwen3-0.6B", HERMES, thought=THINK),
    "qwen3-no-thinking": Family("Qwen-Qwen3-0.6B", HERMES, options={"enable_thinking": False}),
    "qwq": Family("Qwen-QwQ-32B", HERMES, thought=OPEN_THINK),
    "qwen2.5": Family("Qwen-Qwen2.5-7B-Instruct", HERMES),
    "qwen3-coder": Family(
        "Qwen3-Coder",
        _xml(
            "<parameter={}>\n{}\n</parameter>\n",
            "<tool_call>\n<function={}>\n",
            "</function>\n</tool_call>",
        ),
    ),
    "hermes-3": Family("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", HERMES),
    "granite-4": Family("ibm-granite-granite-4.0", HERMES),
    "granite-3.3": Family("ibm-granite-granite-3.3-2B-Instruct", HERMES),
    "granite-3.3-thinking": Family(
        "ibm-granite-granite-3.3-2B-Instruct",
        HERMES,
        thought=("<think>", "</think>"),
        content=("<response>", "</response>"),
        options={"enable_thinking": True},
    ),
    "deepseek-r1": Family(
        "llama-cpp-deepseek-r1",
        _r1_call,
        calls=R1_CALLS,
        thought=OPEN_THINK,
    ),
    "deepseek-r1-distill": Family(
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        _r1_call,
        calls=R1_CALLS,
        thought=OPEN_THINK,
    ),
    "deepseek-v3.1": Family(
        "deepseek-ai-DeepSeek-V3.1",
        _deepseek_call,
        calls=(R1_CALLS[0], "", R1_CALLS[2]),
        thought=("", "</think>"),
    ),
    "deepseek-v3.1-no-thinking": Family(
        "deepseek-ai-DeepSeek-V3.1",
        _deepseek_call,
        calls=(R1_CALLS[0], "", R1_CALLS[2]),
        options={"enable_thinking": False},
    ),
    "gpt-oss": Family(
        "openai-gpt-oss-120b",
        lambda _, name, args: (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(args)}"
        ),
        thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        content=("<|channel|>final<|message|>", ""),
        content_before_calls=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
        parallel=False,
    ),
    "llama-3.1": Family(
        "meta-llama-Llama-3.1-8B-Instruct",
        _json_call("", "", "parameters"),
        content_before_calls=None,
        parallel=False,
    ),
    "llama-3.3": Family(
        "meta-llama-Llama-3.3-70B-Instruct",
        _json_call("", "", "parameters"),
        content_before_calls=None,
        parallel=False,
    ),
    "mistral-nemo": Family(
        "mistralai-Mistral-Nemo-Instruct-2407",
        lambda i, name, args: (
            f'{{"name": "{name}", "arguments": {json.dumps(args)}, "id": "{_mistral_id(i)}"}}'
        ),
        calls=("[TOOL_CALLS][", ", ", "]"),
        content_before_calls=("", ""),
    ),
    "ministral-3": Family(
        "mistralai-Ministral-3-14B-Reasoning-2512",
        lambda _, name, args: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}",
        calls=("", "", ""),
        thought=("[THINK]", "[/THINK]"),
        content_before_calls=("", ""),
    ),
    "kimi-k2": Family(
        "Kimi-K2-Instruct",
        lambda i, name, args: (
            f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(args)}<|tool_call_end|>"
        ),
        calls=("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
        ids=lambda i, name: f"functions.{name}:{i}",
    ),
    "minimax-m2": Family(
        "MiniMax-M2",
        _xml('<parameter name="{}">{}</parameter>\n', '<invoke name="{}">\n', "</invoke>\n"),
        calls=("<minimax:tool_call>\n", "", "</minimax:tool_call>"),
        thought=OPEN_THINK,
        parallel=False,  # llama.cpp's parser separates calls otherwise than the model does
        markup=("<minimax", "<invoke"),
    ),
    "glm-4.6": Family(
        "GLM-4.6",
        _xml(
            "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
            "<tool_call>{}\n",
            "</tool_call>",
        ),
        thought=("\n<think>", "</think>\n"),
        markup=("<arg_",),
    ),
    "olmoe": Family("olmoe", HERMES),
    "mixtral": Family("mixtral", HERMES),
    "deepseek-v2": Family("deepseek-v2", HERMES),
}

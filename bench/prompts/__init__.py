"""What the benchmark of speculation asks: seven workloads of ten conversations each, written for it.

One text file for each workload. Lines of `=====` part conversations, lines of `-----` part the turns of
one, user first, user last. A conversation is answered once, after its last turn: what the assistant said
in earlier turns is part of the file, so that every method continues the same conversation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from s2moe.bench.workload import Messages

WORKLOADS: Final = ("multi_turn", "rag", "summarise", "translate", "qa", "maths", "code")
N_PROMPTS: Final = 10
"""Of each workload."""

_NAMES: Final = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack")
"""The conversations of a workload differ from the first word on, so that none finds a part of itself in
the KV cache that another left: how a prompt is cut into batches would depend on what was asked before
it."""
_FOLDER: Final = Path(__file__).parent
_BETWEEN_CONVERSATIONS: Final = "=====\n"
_BETWEEN_TURNS: Final = "-----\n"


def prompts(workload: str) -> list[Messages]:
    """The conversations of one of WORKLOADS, N_PROMPTS of them."""
    text = (_FOLDER / f"{workload}.txt").read_text(encoding="utf-8")
    conversations = text.split(_BETWEEN_CONVERSATIONS)
    return [
        _messages(name, each.split(_BETWEEN_TURNS)) for name, each in zip(_NAMES, conversations, strict=True)
    ]


def _messages(name: str, turns: list[str]) -> Messages:
    roles = ("user", "assistant")
    return [
        {"role": "system", "content": f"{name} asks. You are a helpful assistant."},
        *({"role": roles[index % 2], "content": turn.strip()} for index, turn in enumerate(turns)),
    ]

"""The conversations that the benchmark of speculation asks."""

from __future__ import annotations

import pytest

from s2moe.bench.prompts import N_PROMPTS, WORKLOADS, prompts
from s2moe.bench.workload import N_CTX


def test_seventy_distinct_conversations() -> None:
    turns = [
        message["content"]
        for workload in WORKLOADS
        for conversation in prompts(workload)
        for message in conversation[1:]
    ]
    assert all(turn and turn == turn.strip() for turn in turns)
    assert len(set(turns)) == len(turns)
    assert sum(len(prompts(workload)) for workload in WORKLOADS) == 70
    assert N_PROMPTS == 10


@pytest.mark.parametrize("workload", WORKLOADS)
def test_turns_alternate_and_the_user_has_the_last_word(workload: str) -> None:
    n_turns = 5 if workload == "multi_turn" else 1
    for conversation in prompts(workload):
        roles = [message["role"] for message in conversation]
        assert roles == ["system", *["user", "assistant", "user", "assistant", "user"][:n_turns]]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_conversations_of_a_workload_differ_from_the_first_word_on(workload: str) -> None:
    """So none finds a part of itself in the KV cache of the one before."""
    words = [conversation[0]["content"].split()[0] for conversation in prompts(workload)]
    assert len(set(words)) == N_PROMPTS


@pytest.mark.parametrize("workload", ["rag", "summarise"])
def test_passages_are_long_and_fit_the_context(workload: str) -> None:
    for conversation in prompts(workload):
        n_words = len(conversation[-1]["content"].split())
        assert 150 <= n_words <= 310
        assert n_words * 1.5 + 64 < N_CTX

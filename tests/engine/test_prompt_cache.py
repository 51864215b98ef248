"""Which conversations are kept beside the KV cache, and which are taken up again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fake_sequence import BYTES_PER_TOKEN, FakeSequence
from hypothesis import given
from hypothesis import strategies as st

from s2moe.engine import prompt_cache as module
from s2moe.engine.evaluated_tokens import EvaluatedTokens, common_prefix, token_array
from s2moe.engine.prompt_cache import (
    EVICTED,
    LOADED,
    MIN_DROPPED_TOKENS,
    MIN_GAINED_TOKENS,
    RESTORED,
    SAVED,
    PromptCache,
    snapshot_bytes,
)
from s2moe.engine.sequence_state import HostBuffer
from s2moe.engine.snapshot_files import SnapshotFiles, SnapshotIdentity

A = list(range(1000, 1100))
B = list(range(2000, 2100))
C = list(range(3000, 3100))
SIZE = snapshot_bytes(EvaluatedTokens(token_array(A), 0), BYTES_PER_TOKEN * len(A))
"""Of the snapshot of each."""
IDENTITY = SnapshotIdentity(model="m", llama_build="b", kv_types="1 1")


class Conversations:
    """A model's part in reuse_prefix(), on a fake KV cache."""

    def __init__(
        self,
        budget_bytes: int = 10 * SIZE,
        *,
        directory: Path | None = None,
        sequence: FakeSequence | None = None,
    ) -> None:
        self.sequence = sequence or FakeSequence()
        events = Counter[str]()
        files = None if directory is None else SnapshotFiles(directory, IDENTITY, budget_bytes, events)
        self.cache = PromptCache(self.sequence, budget_bytes, files, events=events)
        self.n_exact = 0

    @property
    def live(self) -> EvaluatedTokens:
        return EvaluatedTokens(token_array(self.sequence.tokens), self.n_exact)

    def ask(
        self, prompt: list[int], answer: list[int] | None = None, *, exact: bool = False, bends: bool = False
    ) -> int:
        """Returns how many tokens were reused. `bends`: gating has a part in the answer."""
        held = self.cache.exchange(self.live, prompt, exact=exact)
        if held is not None:
            assert list(held.tokens) == self.sequence.tokens
            self.n_exact = held.n_exact
        live = self.live
        n = live.usable(token_array(prompt[:-1]), exact=exact, can_be_cut=True)
        if n < len(live) and not (n and self.sequence.cut(n)):
            n = 0
            self.sequence.clear()
        self.n_exact = min(self.n_exact, n)
        was_exact = self.n_exact == n
        self.sequence.tokens += prompt[n:]
        if was_exact:
            self.n_exact = len(prompt)
        self.sequence.tokens += answer or []
        if was_exact and not bends:
            self.n_exact = len(self.sequence.tokens)
        assert self.cache.n_bytes <= self.cache.budget_bytes
        return n


def test_two_conversations_alternate() -> None:
    talk = Conversations(40 * SIZE)
    assert [talk.ask(A), talk.ask(B)] == [0, 0]
    for turn in range(4):
        assert talk.ask(A + [7] * 40 * (turn + 1)) == len(A) + 40 * turn
        assert talk.ask(B + [8] * 40 * (turn + 1)) == len(B) + 40 * turn
    events = talk.cache.take_events()
    assert events[RESTORED] == 8
    assert EVICTED not in events
    assert talk.cache.take_events() == {}


def test_without_memory_nothing_is_kept() -> None:
    talk = Conversations(0)
    assert [talk.ask(A), talk.ask(B), talk.ask([*A, 1])] == [0, 0, 0]
    assert (talk.cache.n_entries, talk.cache.n_bytes, talk.cache.take_events()) == (0, 0, {})


def test_next_turn_of_the_running_conversation_copies_nothing() -> None:
    talk = Conversations()
    talk.ask(A, [1, 2, 3])
    assert talk.ask([*A, 1, 2, 3, 4]) == len(A) + 3
    assert talk.ask([*A, 9]) == len(A)  # a few tokens are dropped
    assert talk.cache.take_events() == {}


def test_what_is_dropped_of_the_running_conversation_comes_back() -> None:
    talk = Conversations()
    answer = list(range(50))
    talk.ask(A, answer)
    assert talk.ask([*A, 99]) == len(A)
    assert talk.ask([*A, *answer, 1]) == len(A) + len(answer)
    # a token more than a snapshot has is not worth another
    assert talk.cache.take_events() == {SAVED: 1, RESTORED: 1}


@pytest.mark.parametrize("n_common", [MIN_GAINED_TOKENS - 1, MIN_GAINED_TOKENS])
def test_snapshot_must_share_more_than_a_few_tokens(n_common: int) -> None:
    talk = Conversations()
    talk.ask(A)
    talk.ask(B)
    reused = talk.ask([*A[:n_common], *C])
    assert reused == (n_common if n_common == MIN_GAINED_TOKENS else 0)


@pytest.mark.parametrize("n_tokens", [MIN_DROPPED_TOKENS, MIN_DROPPED_TOKENS + 1])
def test_short_conversations_are_not_worth_a_copy(n_tokens: int) -> None:
    talk = Conversations()
    talk.ask(A[:n_tokens])
    talk.ask(B)
    assert talk.cache.n_entries == (n_tokens > MIN_DROPPED_TOKENS)


def test_exact_requests_use_the_exact_part_only() -> None:
    talk = Conversations()
    answer = list(range(40))
    talk.ask(A, answer, bends=True)
    talk.ask(B)
    assert talk.ask([*A, *answer, 5], exact=True) == len(A)
    talk.ask(B)
    # what was evaluated exactly since then counts: it is in a snapshot of its own
    assert talk.ask([*A, *answer, 6], exact=True) == len(A) + len(answer)


def test_longest_unused_is_evicted() -> None:
    talk = Conversations(2 * SIZE)
    for prompt in (A, B, C, A):
        talk.ask(prompt)
    # A was restored while B and C had room, so C replaced B
    assert talk.ask(B) == 0
    assert talk.cache.take_events()[EVICTED] >= 1


def test_snapshot_that_another_begins_with_goes_first() -> None:
    talk = Conversations(4 * SIZE)
    talk.ask(B)
    talk.ask(A)
    talk.ask(B)
    talk.ask([*A, *range(40)])  # both are snapshots now, A used last
    talk.ask(C)  # the longer A is one more, and covers the other
    talk.ask(list(range(4000, 4100)))
    assert talk.cache.take_events()[EVICTED] == 1
    assert talk.ask([*B, 1]) == len(B)


def test_snapshot_to_be_restored_is_not_evicted_for_the_other() -> None:
    talk = Conversations(SIZE)
    talk.ask(A)
    talk.ask(B)
    assert talk.ask([*A, 1]) == len(A)
    assert talk.cache.take_events() == {SAVED: 1, RESTORED: 1}  # there was no room to save B


def test_same_conversation_is_kept_once() -> None:
    talk = Conversations()
    for _ in range(3):
        talk.ask(A)
        talk.ask(B)
    assert talk.cache.n_entries == 2


def test_state_that_cannot_be_cut_is_used_as_a_whole() -> None:
    talk = Conversations(sequence=FakeSequence(is_recurrent=True))
    talk.ask(A, [1, 2])
    talk.ask(B)
    assert talk.ask([*A, 5]) == 0
    talk.ask(B)
    assert talk.ask([*A, 1, 2, 3]) == len(A) + 2


def test_rows_with_a_window_are_kept_up_to_the_prompts_end() -> None:
    talk = Conversations(sequence=FakeSequence(n_window=8))
    prompt = [*A]
    talk.ask(prompt, [5] * 60)
    for turn in range(3):
        talk.ask([*B, turn], [6] * 60)
        # the answer comes back without its reasoning
        assert talk.ask([*prompt, *range(40)], [5] * 60) == len(prompt) - 1
        prompt += range(40)
    # another beginning of it is of no use
    talk.ask(B)
    assert talk.ask([*A[:70], 7]) == 0


def test_failed_restore_costs_the_snapshot_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    talk = Conversations()
    talk.ask(A)
    talk.ask(B)
    talk.sequence.refuses = True
    assert talk.ask([*A, 1]) == 0
    assert "dropped" in caplog.text
    talk.sequence.refuses = False
    assert talk.ask([*B, 1]) == len(B)


def test_failed_allocation_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_n_bytes: int) -> HostBuffer:
        raise MemoryError("no memory")

    talk = Conversations()
    monkeypatch.setattr(module, "HostBuffer", fail)
    talk.ask(A)
    assert talk.ask(B) == 0
    assert (talk.cache.n_entries, talk.cache.n_bytes) == (0, 0)


def test_dropping_frees_what_is_asked_for() -> None:
    talk = Conversations()
    for prompt in (A, B, C, [*C[:50], *A]):
        talk.ask(prompt)
    before = talk.cache.n_bytes
    assert talk.cache.drop(SIZE + 1) == 2 * SIZE
    assert talk.cache.n_bytes == before - 2 * SIZE
    assert talk.cache.drop(1 << 40) == before - 2 * SIZE
    assert (talk.cache.n_entries, talk.cache.drop(1)) == (0, 0)


def test_memory_of_a_buffer_goes_back_when_it_is_closed() -> None:
    buffer = HostBuffer(10_000)
    assert buffer.n_bytes == 12_288
    with buffer.view() as rows:
        rows[:3] = b"abc"
    buffer.close()
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        buffer.view()


@given(
    budget=st.integers(0, 6 * SIZE),
    prompts=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 120), st.integers(0, 80), st.booleans(), st.booleans()),
        max_size=30,
    ),
    kind=st.sampled_from(["plain", "window", "recurrent"]),
)
def test_no_budget_is_exceeded_and_no_rows_are_mixed_up(
    budget: int, prompts: list[tuple[int, int, int, bool, bool]], kind: str
) -> None:
    sequence = FakeSequence(n_window=8 * (kind == "window"), is_recurrent=kind == "recurrent")
    talk = Conversations(budget, sequence=sequence)
    for topic, n_prompt, n_answer, exact, bends in prompts:
        prompt = [1000 * topic + i for i in range(n_prompt)]
        answer = [-1 - i for i in range(n_answer)]
        reused = talk.ask(prompt, answer, exact=exact, bends=bends)
        assert 0 <= reused < len(prompt)
        assert talk.sequence.tokens == prompt + answer


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_is_the_longest(ours: list[int], theirs: list[int]) -> None:
    n = common_prefix(token_array(ours), token_array(theirs))
    assert ours[:n] == theirs[:n]
    assert n == min(len(ours), len(theirs)) or ours[n] != theirs[n]


# files


def test_evicted_conversation_is_read_from_its_file(tmp_path: Path) -> None:
    talk = Conversations(2 * SIZE + 2000, directory=tmp_path / "kept")
    for prompt in (A, B, C, [9] * 100):
        talk.ask(prompt)
    assert talk.cache.take_events() == {SAVED: 3, EVICTED: 1}
    assert talk.ask([*A, 1]) == len(A)
    events = talk.cache.take_events()
    assert (events[LOADED], events[RESTORED]) == (1, 1)


def test_next_run_takes_up_what_this_one_leaves(tmp_path: Path) -> None:
    first = Conversations(directory=tmp_path)
    first.ask(A)
    first.ask(B, [5, 6])
    first.cache.close(first.live)
    second = Conversations(directory=tmp_path)
    assert second.cache.n_entries == 0
    assert 0 < second.cache.n_bytes < SIZE  # the index
    assert second.ask([*A, 1]) == len(A)
    assert second.ask([*B, 5, 6, 7]) == len(B) + 2
    assert second.cache.take_events() == {LOADED: 2, RESTORED: 2}


def test_what_another_file_begins_with_is_not_kept_twice(tmp_path: Path) -> None:
    first = Conversations(directory=tmp_path)
    first.ask(A)
    first.cache.close(first.live)
    second = Conversations(directory=tmp_path)
    second.ask([*A, *range(50)])
    second.cache.close(second.live)
    assert len(list(tmp_path.iterdir())) == 1
    assert Conversations(directory=tmp_path).ask([*A, *range(50), 1]) == len(A) + 50


def test_damaged_file_is_evaluated_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Conversations(directory=tmp_path)
    first.ask(A)
    first.cache.close(first.live)
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    second = Conversations(directory=tmp_path)
    assert second.ask([*A, 1]) == 0
    assert second.cache.take_events() == {"failed": 1}
    assert "damaged" in caplog.text


def test_file_longer_than_the_context_is_left_alone(tmp_path: Path) -> None:
    first = Conversations(directory=tmp_path)
    first.ask(A)
    first.cache.close(first.live)
    second = Conversations(directory=tmp_path, sequence=FakeSequence(n_ctx=len(A)))
    assert second.ask(A[:90]) == 0
    assert second.cache.take_events() == {}

"""Speculation in the engine process, on the tiny demo model: the same text, exact ends, and its report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_rig import Chat, EngineProcess

from s2moe.engine import messages as wire
from s2moe.engine.memory import MIB

from paying_drafts import with_paying_drafts
from undraftable_models import write_dense_model

STORY = ("user", "Tell me a long story about a river and the people who live beside it.")
PROMPTS = (
    STORY,
    ("user", "What is the capital of France?"),
    ("user", "Write a list of ten animals, one per line."),
    ("user", "def fibonacci(n):"),
)
OFF = wire.Speculation(method="off")
EXACT = wire.Speculation(exact=True)
FORCED = wire.Speculation(exact=True, adaptive=False)
"""Drafts in every step, whether they pay or not."""
N_TOKENS = 48
STATE_FOLDER = "speculation"

Spawn = Callable[[], EngineProcess]


@pytest.fixture(scope="module")
def chat(tiny_model_path: Path) -> Iterator[Chat]:
    """An engine with its default speculation, shared by the tests of this module."""
    engine = EngineProcess()
    ready = engine.load(tiny_model_path, n_ctx=1024, n_batch=256, speculation=wire.Speculation())
    assert isinstance(ready, wire.Ready), ready
    assert (ready.model.speculation_method, ready.model.speculation_preset) == ("s2moe", "balanced")
    assert ready.model.speculation_limit == ""
    yield Chat(engine)
    engine.close()


def load(spawn: Spawn, model: Path, **options: object) -> tuple[Chat, wire.Ready]:
    engine = spawn()
    options.setdefault("speculation", wire.Speculation())
    ready = engine.load(model, n_ctx=512, n_batch=64, **options)
    assert isinstance(ready, wire.Ready), ready
    return Chat(engine), ready


def report_of(finished: wire.Finished) -> wire.SpeculationReport:
    report = finished.timings.speculation
    assert report is not None
    return report


def ask_both(
    chat: Chat, prompt: tuple[str, str], speculation: wire.Speculation, **options: object
) -> tuple[tuple[str, wire.Finished], tuple[str, wire.Finished]]:
    """The answers without and with speculation, on the very same KV cache: how a prompt is cut into batches
    depends on what the cache held, and rounding on how it is cut."""
    chat.ask(prompt, max_tokens=1, speculation=OFF)
    plain = chat.ask(prompt, **options, speculation=OFF)
    drafted = chat.ask(prompt, **options, speculation=speculation)
    assert plain[1].n_cached_tokens == drafted[1].n_cached_tokens == plain[1].n_prompt_tokens - 1
    return plain, drafted


# ── the same answers ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("speculation", [EXACT, FORCED], ids=["adaptive", "forced"])
def test_greedy_text_is_that_of_speculation_off(chat: Chat, speculation: wire.Speculation) -> None:
    n_accepted = n_steps = n_tokens = 0
    for prompt in PROMPTS:
        (expected, plain), (text, finished) = ask_both(chat, prompt, speculation, max_tokens=N_TOKENS)
        assert text == expected
        assert (finished.reason, finished.n_completion_tokens) == (plain.reason, plain.n_completion_tokens)
        assert plain.timings.speculation is None
        report = report_of(finished)
        assert (report.method, report.preset, report.displaced_weight) == ("s2moe", "exact", 0)
        assert report.n_tokens + 1 == finished.n_completion_tokens
        assert report.n_steps == finished.timings.n_decode_steps
        n_accepted += report.n_accepted
        n_steps += report.n_steps
        n_tokens += report.n_tokens
    assert n_tokens == n_steps + n_accepted
    if speculation is FORCED:
        assert n_accepted > 0


def test_trees_that_branch_as_it_pays_give_the_same_text(
    spawn: Spawn, tiny_model_path: Path, cache_directory: Path
) -> None:
    """The adaptive drafts of a server that learnt in an earlier run that they pay."""
    # one thread: two are slow where other processes want the processors
    chat, _ = load(spawn, tiny_model_path, keep_expert_counts=True, n_threads=1)
    chat.ask(STORY, max_tokens=2, speculation=EXACT)
    chat.engine.send(wire.Shutdown())
    assert chat.engine.process.wait(20) == 0
    (kept,) = cache_directory.iterdir()
    content = json.loads(kept.read_text())
    content["state"] = json.loads(with_paying_drafts(json.dumps(content["state"]).encode()))
    kept.write_text(json.dumps(content))
    chat, _ = load(spawn, tiny_model_path, keep_expert_counts=True, n_threads=1)
    for prompt in (STORY, PROMPTS[3]):
        (expected, _), (text, finished) = ask_both(chat, prompt, EXACT, max_tokens=24)
        assert text == expected
        report = report_of(finished)
        assert report.is_paced
        assert report.controller_state == "drafting"
        assert report.n_iterations > report.n_steps / 2
        assert report.admitted_by_depth[0] > report.n_iterations, "no root had two children"
        assert report.n_accepted > 0
        assert report.draft_length > 1
        judged = [sum(n for n, _, _ in tenths) for tenths in report.judged_drafts]
        assert sum(n for tenths in report.judged_drafts for _, n, _ in tenths) == report.n_accepted
        assert report.n_accepted < sum(judged) <= report.n_admitted


@pytest.mark.parametrize(
    "sampling",
    [
        wire.Sampling(temperature=1.0, seed=7),
        wire.Sampling(temperature=0, repeat_penalty=1.3),
        wire.Sampling(temperature=0, frequency_penalty=0.5, logit_bias={100: 2.0}),
        wire.Sampling(temperature=0, grammar='root ::= [a-z ]{20,60} "!"'),
    ],
    ids=["seed", "repeat penalty", "bias", "grammar"],
)
def test_the_requests_own_sampler_chooses_every_token(chat: Chat, sampling: wire.Sampling) -> None:
    (expected, _), (text, finished) = ask_both(chat, STORY, FORCED, max_tokens=N_TOKENS, sampling=sampling)
    assert text == expected
    assert report_of(finished).n_iterations > 0


@pytest.mark.parametrize("n", range(1, 10))
def test_max_tokens_is_exact(chat: Chat, n: int) -> None:
    (expected, _), (text, finished) = ask_both(chat, STORY, FORCED, max_tokens=n)
    assert text == expected
    assert (finished.reason, finished.n_completion_tokens) == ("length", n)


def test_stop_string_ends_the_answer_wherever_in_a_step_it_falls(chat: Chat) -> None:
    (_, _), (whole, _) = ask_both(chat, STORY, FORCED, max_tokens=N_TOKENS)
    for begin in range(20, 60, 8):
        stop = whole[begin : begin + 4]
        plain, drafted = (
            chat.ask(STORY, max_tokens=N_TOKENS, stop=[stop], speculation=each) for each in (OFF, FORCED)
        )
        assert plain[0] == drafted[0] == whole[: whole.index(stop)]
        for _, finished in (plain, drafted):
            assert (finished.reason, finished.stop_string) == ("stop", stop)
        assert plain[1].n_completion_tokens == drafted[1].n_completion_tokens


def test_kv_cache_after_a_cut_step_is_what_it_says(chat: Chat) -> None:
    """A second turn reuses the first one's cache; were a token there that is not listed, or none where one
    is, its text would not be that of an empty cache."""
    whole, _ = chat.ask(STORY, max_tokens=N_TOKENS, speculation=OFF)
    stop = whole[40:44]
    first, _ = chat.ask(STORY, max_tokens=N_TOKENS, stop=[stop], speculation=FORCED)
    turn = (STORY, ("assistant", first), ("user", "Go on."))
    reused, finished = chat.ask(*turn, max_tokens=24, speculation=FORCED)
    assert finished.n_cached_tokens > finished.n_prompt_tokens // 2
    chat.ask(PROMPTS[1], max_tokens=4, speculation=OFF)
    fresh, again = chat.ask(*turn, max_tokens=24, speculation=OFF)
    assert again.n_cached_tokens < finished.n_cached_tokens
    assert reused == fresh


def test_answer_fills_the_context_to_its_end(chat: Chat) -> None:
    endless = wire.Sampling(temperature=0, logit_bias={2: -1000})
    prompt = ("user", "word " * 950)
    (expected, _), (text, finished) = ask_both(chat, prompt, FORCED, max_tokens=None, sampling=endless)
    assert finished.reason == "length"
    assert finished.n_prompt_tokens + finished.n_completion_tokens == 1024
    assert text == expected


# ── one token at a time for the client ──────────────────────────────────────────────────────────


def test_tokens_of_a_step_come_one_by_one_with_one_time(chat: Chat) -> None:
    chat.wait_idle()
    chat.engine.send(chat.request(STORY, max_tokens=N_TOKENS, speculation=FORCED))
    received = chat.engine.receive_until(wire.Finished)
    finished = received[-1]
    assert isinstance(finished, wire.Finished)
    steps = [message for message in received if isinstance(message, wire.Step)]
    assert sum(step.n_tokens for step in steps) == finished.n_completion_tokens == N_TOKENS
    assert max(step.n_tokens for step in steps) <= 4  # what a character or a stop string may hold back
    times = [step.sampled_ns for step in steps]
    assert times == sorted(times)
    assert len(set(times)) < len(times)
    stats = [message for message in received if isinstance(message, wire.EngineStats)]
    assert sum(each.generated_tokens for each in stats) == N_TOKENS
    assert sum(each.decode_steps for each in stats) == finished.timings.n_decode_steps < N_TOKENS - 1
    report = report_of(finished)
    assert 0 < report.draft_seconds + report.verify_seconds < finished.timings.decode_seconds
    durations = finished.timings.step_durations
    assert sum(durations["verify"].counts) == report.n_iterations > 0
    assert sum(durations["plain"].counts) == report.n_steps - report.n_iterations
    assert sum(durations["draft"].counts) >= report.n_iterations
    assert durations["draft"].seconds == pytest.approx(report.draft_seconds)
    evaluated = durations["verify"].seconds + durations["plain"].seconds
    assert evaluated == pytest.approx(report.verify_seconds)
    assert finished.timings.decode_experts is not None
    assert finished.timings.decode_experts.n_lookups >= report.n_experts_touched > 0


def test_abort_ends_a_speculative_answer_at_once(chat: Chat) -> None:
    expected, _ = chat.ask(STORY, max_tokens=24, speculation=OFF)
    for n_before in (1, 5, 11):
        request = chat.request(STORY, max_tokens=500, speculation=FORCED)
        chat.engine.send(request)
        n_steps = 0
        while n_steps < n_before:
            n_steps += isinstance(chat.engine.receive(), wire.Step)
        chat.engine.send(wire.Abort(request_id=request.request_id))
        finished = chat.engine.receive_until(wire.Finished, wire.Failed)[-1]
        assert isinstance(finished, wire.Finished)
        assert finished.reason == "cancelled"
        assert finished.n_completion_tokens < 500
        assert report_of(finished).method == "s2moe"
        assert chat.ask(STORY, max_tokens=24, speculation=FORCED)[0] == expected


# ── options ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("speculation", "param"),
    [
        (wire.Speculation(draft_experts=3), "s2moe.draft_experts"),
        (wire.Speculation(max_nodes=0), "s2moe.max_nodes"),
        (wire.Speculation(max_nodes=8), "s2moe.max_nodes"),
        (wire.Speculation(reuse_cap=1), "s2moe.reuse_cap"),
        (wire.Speculation(reuse_strength=-1.0), "s2moe.reuse_strength"),
        (wire.Speculation(error_budget=1.5), "s2moe.error_budget"),
        (wire.Speculation(preset="careful"), "s2moe.preset"),
        (wire.Speculation(method="guess"), "s2moe.speculation"),
        (wire.Speculation(method="expert-skip"), "s2moe.speculation"),
        (wire.Speculation(shared_context=False), "s2moe.shared_context"),
    ],
)
def test_bad_option_fails_its_request_alone_and_is_named(
    chat: Chat, speculation: wire.Speculation, param: str
) -> None:
    failed = chat.fail(STORY, speculation=speculation)
    assert (failed.code, failed.param) == ("invalid_value", param)
    assert chat.ask(PROMPTS[1], max_tokens=4, speculation=EXACT)[0]


def test_methods_and_presets_of_a_request_are_what_is_reported(chat: Chat) -> None:
    for speculation, method, preset in (
        (wire.Speculation(), "s2moe", "balanced"),
        (wire.Speculation(preset="fast"), "s2moe", "fast"),
        (wire.Speculation(error_budget=0.02), "s2moe", "custom"),
        (wire.Speculation(reuse_gating=False), "s2moe", "exact"),
        (wire.Speculation(method="cascade"), "cascade", "exact"),
    ):
        _, finished = chat.ask(STORY, max_tokens=24, speculation=speculation)
        report = report_of(finished)
        assert (report.method, report.preset, report.disabled_reason) == (method, preset, "")
        assert report.displaced_weight <= report.error_budget * report.n_token_layers


def test_server_that_is_off_names_the_flag_to_a_request_that_wants_more(
    spawn: Spawn, tiny_model_path: Path
) -> None:
    chat, ready = load(spawn, tiny_model_path, speculation=OFF)
    assert ready.model.speculation_method == "off"
    failed = chat.fail(STORY, speculation=wire.Speculation(method="s2moe"))
    assert (failed.code, failed.param) == ("invalid_value", "s2moe.speculation")
    assert "--speculation s2moe" in failed.message
    _, finished = chat.ask(STORY, max_tokens=4, speculation=wire.Speculation(preset="exact"))
    assert finished.timings.speculation is None


def test_drafts_in_a_context_of_their_own(spawn: Spawn, tiny_model_path: Path) -> None:
    shared = load(spawn, tiny_model_path)[1].plan
    chat, ready = load(spawn, tiny_model_path, speculation=wire.Speculation(method="expert-skip"))
    assert ready.model.speculation_method == "expert-skip"
    assert shared is not None
    assert ready.plan is not None
    kv_of = {pool.pool: pool.budget_bytes for pool in ready.plan.pools}
    kv_shared = {pool.pool: pool.budget_bytes for pool in shared.pools}
    assert kv_of["kv"] == 2 * kv_shared["kv"]
    assert kv_of["compute"] > kv_shared["compute"]
    own = wire.Speculation(method="s2moe", exact=True, adaptive=False, shared_context=False)
    for speculation in (wire.Speculation(), own, FORCED):
        for prompt in (STORY, PROMPTS[2]):
            (expected, _), (text, finished) = ask_both(chat, prompt, speculation, max_tokens=N_TOKENS)
            report = report_of(finished)
            assert report.disabled_reason == ""
            assert report.n_accepted > 0
            assert text == expected


def test_dense_model_is_served_without_drafts_and_says_why(spawn: Spawn, tmp_path: Path) -> None:
    chat, ready = load(spawn, write_dense_model(tmp_path / "dense.gguf"))
    assert ready.model.speculation_method == "off"
    assert "no experts" in ready.model.speculation_limit
    for speculation in (wire.Speculation(), wire.Speculation(method="cascade")):
        _, finished = chat.ask(STORY, max_tokens=8, speculation=speculation)
        report = report_of(finished)
        assert (report.method, report.disabled_reason) == ("off", "unsupported")
        assert report.n_steps == finished.timings.n_decode_steps


def test_batches_too_small_for_a_verification_are_served_without(spawn: Spawn, tiny_model_path: Path) -> None:
    engine = spawn()
    ready = engine.load(tiny_model_path, n_ctx=512, n_batch=7, speculation=wire.Speculation())
    assert isinstance(ready, wire.Ready), ready
    assert ready.model.speculation_method == "off"
    assert "--batch-size is 7" in ready.model.speculation_limit
    assert Chat(engine).ask(PROMPTS[1], max_tokens=4, speculation=FORCED)[0]


# ── memory ──────────────────────────────────────────────────────────────────────────────────────


# every width of a verification, each of which keeps buffers
EVERY_WIDTH = [
    *((wire.Speculation(exact=True, adaptive=False, max_nodes=n), 16) for n in range(1, 8)),
    (wire.Speculation(preset="fast", adaptive=False), 16),
]
WIDE = [(wire.Speculation(method="expert-skip"), n_tokens) for n_tokens in range(9, 4, -1)]


@pytest.mark.parametrize(
    ("method", "budget_bytes", "answers"),
    [("s2moe", 360 * MIB, EVERY_WIDTH), ("expert-skip", 400 * MIB, [*WIDE, *EVERY_WIDTH])],
    ids=["s2moe", "expert-skip"],
)
def test_drafts_stay_within_the_budget(
    spawn: Spawn,
    tiny_model_path: Path,
    method: str,
    budget_bytes: int,
    answers: list[tuple[wire.Speculation, int]],
) -> None:
    chat, ready = load(
        *(spawn, tiny_model_path),
        memory_budget_bytes=budget_bytes,
        speculation=wire.Speculation(method=method),
    )
    assert ready.plan is not None
    assert ready.plan.n_slots < ready.plan.n_experts
    stats: list[wire.EngineStats] = []
    for speculation, n_tokens in answers:
        chat.engine.send(chat.request(STORY, max_tokens=n_tokens, speculation=speculation))
        received = chat.engine.receive_until(wire.Finished, wire.Failed)
        assert isinstance(received[-1], wire.Finished), received[-1]
        stats += [message for message in received if isinstance(message, wire.EngineStats)]
    assert max(each.rss_bytes for each in stats) <= budget_bytes
    # the plan counted the drafts' buffers: no slots had to be given back for them
    assert all(each.memory_pressure_events == {} for each in stats)


# ── what was learnt ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("S2MOE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / STATE_FOLDER


def run(spawn: Spawn, model: Path, n_requests: int, *, keep: bool = True, **options: object) -> str:
    """A server's life; returns its log."""
    chat, _ = load(spawn, model, keep_expert_counts=keep, **options)
    for _ in range(n_requests):
        chat.ask(STORY, max_tokens=24, speculation=FORCED)
    chat.engine.send(wire.Shutdown())
    process = chat.engine.process
    assert process.wait(20) == 0
    assert process.stderr is not None
    return process.stderr.read().decode()


def test_what_was_learnt_is_kept_at_shutdown_and_used_by_the_next_run(
    spawn: Spawn, tiny_model_path: Path, cache_directory: Path
) -> None:
    run(spawn, tiny_model_path, 0)
    assert not cache_directory.exists()
    run(spawn, tiny_model_path, 1)
    (kept,) = cache_directory.iterdir()
    first = kept.read_text()
    assert '"state"' in first
    assert "river" not in first
    log = run(spawn, tiny_model_path, 0)
    assert "ignored" not in log
    assert kept.read_text() == first
    run(spawn, tiny_model_path, 1)
    assert [kept] == list(cache_directory.iterdir())
    assert kept.read_text() != first


def test_other_settings_of_the_next_start_are_no_damage(
    spawn: Spawn, tiny_model_path: Path, cache_directory: Path
) -> None:
    run(spawn, tiny_model_path, 1)
    (kept,) = cache_directory.iterdir()
    first = kept.read_text()
    for asked in (wire.Speculation(preset="fast"), wire.Speculation(exact=True, max_nodes=4)):
        log = run(spawn, tiny_model_path, 0, speculation=asked)
        assert "ignored" not in log
        assert kept.read_text() == first


@pytest.mark.parametrize("damage", [b"", b"{]", b'{"state": 1}'])
def test_damaged_state_is_a_warning_and_is_replaced(
    spawn: Spawn, tiny_model_path: Path, cache_directory: Path, damage: bytes
) -> None:
    run(spawn, tiny_model_path, 1)
    (kept,) = cache_directory.iterdir()
    kept.write_bytes(damage)
    log = run(spawn, tiny_model_path, 1)
    assert log.count("what speculation learnt in earlier runs is ignored") == 1
    assert kept.read_bytes() != damage


def test_damage_within_the_state_is_a_warning_too(
    spawn: Spawn, tiny_model_path: Path, cache_directory: Path
) -> None:
    run(spawn, tiny_model_path, 1)
    (kept,) = cache_directory.iterdir()
    content = json.loads(kept.read_text())
    content["state"]["verify"] = [1]
    kept.write_text(json.dumps(content))
    log = run(spawn, tiny_model_path, 0)
    assert log.count("what speculation learnt in earlier runs is ignored in part") == 1


def test_nothing_is_kept_when_told_so(spawn: Spawn, tiny_model_path: Path, cache_directory: Path) -> None:
    run(spawn, tiny_model_path, 1, keep=False)
    assert not cache_directory.exists()


def test_load_says_what_speculation_does(spawn: Spawn, tiny_model_path: Path, tmp_path: Path) -> None:
    for model, speculation, line in (
        (tiny_model_path, wire.Speculation(), "speculation is s2moe, preset balanced: drafts on the shared"),
        (tiny_model_path, OFF, "speculation is off, as --speculation says"),
        (
            write_dense_model(tmp_path / "dense.gguf"),
            wire.Speculation(),
            "speculation is off: the model has no",
        ),
    ):
        engine = spawn()
        engine.load(model, n_ctx=512, n_batch=64, speculation=speculation)
        engine.send(wire.Shutdown())
        assert engine.process.wait(20) == 0
        assert engine.process.stderr is not None
        assert line in engine.process.stderr.read().decode()


@pytest.mark.parametrize(
    ("asked", "preset"),
    [
        (wire.Speculation(), "balanced"),
        (wire.Speculation(error_budget=0.2), "custom"),
        (wire.Speculation(reuse_strength=2.0), "custom"),
        (wire.Speculation(preset="balanced", single_token_bias=False), "custom"),
        (wire.Speculation(method="cascade"), "exact"),
        (wire.Speculation(method="cascade", preset="fast"), "fast"),
        (wire.Speculation(preset="fast", exact=True), "exact"),
        (wire.Speculation(preset="fast", reuse_gating=False), "exact"),
        (wire.Speculation(preset="fast", error_budget=0.0), "exact"),
    ],
)
def test_preset_of_the_server_is_the_one_its_responses_report(
    spawn: Spawn, tiny_model_path: Path, asked: wire.Speculation, preset: str
) -> None:
    chat, ready = load(spawn, tiny_model_path, speculation=asked)
    assert ready.model.speculation_preset == preset
    _, finished = chat.ask(STORY, max_tokens=2)
    assert report_of(finished).preset == preset


def test_exact_answer_does_not_build_on_gated_keys_and_values(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    engine = spawn()
    # room for less than half of the experts, so that gating has something to prefer
    ready = engine.load(
        tiny_model_path,
        n_ctx=1024,
        memory_budget_bytes=320 * 2**20,
        keep_expert_counts=False,
        speculation=wire.Speculation(preset="fast"),
    )
    assert isinstance(ready, wire.Ready), ready
    chat = Chat(engine)
    first = ("user", "Tell me about the sea.")
    gated, finished = chat.ask(first, max_tokens=24)
    assert finished.timings.speculation is not None
    assert finished.timings.speculation.n_biased_rows > 0
    conversation = (first, ("assistant", gated), ("user", "And now about the moon."))
    exact = wire.Speculation(exact=True)
    follow_up, finished = chat.ask(*conversation, max_tokens=24, speculation=exact)
    prompt_of_first = finished.n_cached_tokens
    chat.ask(("user", "Something else entirely."), max_tokens=2, speculation=exact)
    from_scratch, finished = chat.ask(*conversation, max_tokens=24, speculation=exact)
    assert finished.n_cached_tokens < prompt_of_first
    assert follow_up == from_scratch
    _, finished = chat.ask(*conversation, ("assistant", from_scratch), ("user", "Go on."), max_tokens=2)
    assert finished.n_cached_tokens > prompt_of_first + 24


@pytest.mark.parametrize(
    ("options", "flag"),
    [({"draft_experts": 9}, "--draft-experts"), ({"reuse_cap": 1}, "--reuse-cap")],
    ids=str,
)
def test_settings_that_the_model_cannot_have_end_the_start(
    spawn: Spawn, tiny_model_path: Path, options: dict[str, int], flag: str
) -> None:
    fatal = spawn().load(tiny_model_path, n_ctx=256, speculation=wire.Speculation(**options))
    assert isinstance(fatal, wire.Fatal)
    assert (fatal.code, fatal.retryable) == ("invalid_setting", False)
    assert fatal.message.startswith(f"{flag}: ")


def test_native_report_says_what_drafts_cost(chat: Chat) -> None:
    _, finished = chat.ask(STORY, max_tokens=24, speculation=FORCED)
    report = report_of(finished)
    assert report.n_drafted >= report.n_admitted > report.n_accepted > 0
    assert report.draft_fit.n > 0
    assert report.verify_fit.n > 0
    assert report.single_seconds >= 0


def test_baselines_are_exact_unless_told_otherwise(chat: Chat) -> None:
    _, finished = chat.ask(STORY, max_tokens=8, speculation=wire.Speculation(method="cascade"))
    assert (report_of(finished).preset, report_of(finished).error_budget) == ("exact", 0)

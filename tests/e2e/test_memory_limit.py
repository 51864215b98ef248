"""The real server inside a memory limit that is smaller than its model."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_rig import ServeProcess

from s2moe.bench.process import EXIT_NO_LIMIT, LimitReport, limited, peak_rss_bytes, read_bytes
from s2moe.engine.native import Library
from s2moe.engine.native_experts import model_layout

MIB = 2**20
LIMIT_BYTES = 290 * MIB
"""Of the tiny demo model (389 MiB, 240 experts of 1.5 MiB) about a quarter of the experts fit then."""
BATCH_TOKENS = 64
"""The same with and without a limit: other batches round differently."""
N_TOKENS = 24
SLACK_BYTES = 24 * MIB
"""For the header and whatever of libraries is not cached."""
PROMPTS = (
    "What is the capital of France?",
    "Tell me a long story about a river and the people who live beside it.",
    "Summarise this in one sentence: " + "The mill was built long ago, and its wheel still turns. " * 12,
)


@dataclass
class Reads:
    """Bytes read since the server was started."""

    kernel_bytes: int
    """For the engine, whatever the reason."""
    expert_bytes: float
    """As /metrics tells."""


@dataclass
class Seen:
    """What a server did for the prompts."""

    texts: list[str]
    n_misses: float
    ready: Reads
    done: Reads
    peak_rss_bytes: int
    metrics: str
    report: LimitReport | None = None


def ask(server: ServeProcess) -> Seen:
    server.wait_ready()
    ready = reads(server)
    deadline = time.monotonic() + 10
    while not ready.expert_bytes and time.monotonic() < deadline:
        time.sleep(0.05)  # the report of the start follows the news that the engine is ready
        ready = reads(server)
    answers = [server.chat(prompt, max_tokens=N_TOKENS) for prompt in PROMPTS]
    assert [answer.status_code for answer in answers] == [200] * len(PROMPTS), answers[-1].text
    pids = (server.front_end_pid(), server.engine_pid())
    return Seen(
        texts=[answer.json()["choices"][0]["message"]["content"] for answer in answers],
        n_misses=server.metric('s2moe_expert_cache_lookups_total{phase="decode",result="miss"}'),
        ready=ready,
        done=reads(server),
        peak_rss_bytes=sum(peak_rss_bytes(pid) for pid in pids),
        metrics=server.client.get("/metrics").text,
    )


def reads(server: ServeProcess) -> Reads:
    expert_bytes = sum(
        server.metric(f's2moe_expert_cache_load_bytes_total{{source="disk",trigger="{trigger}"}}')
        for trigger in ("demand", "prefetch", "warmup")
    )
    return Reads(read_bytes(server.engine_pid()), expert_bytes)


def forget_cached(path: Path) -> None:
    """Makes whoever reads the file next pay for it."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture(scope="module")
def flags(tiny_model_path: Path) -> list[str]:
    assert tiny_model_path.stat().st_size > LIMIT_BYTES
    return [
        "--model",
        str(tiny_model_path),
        "--ctx-size",
        "512",
        "--batch-size",
        str(BATCH_TOKENS),
        "--exact",
    ]


def ask_under_limit(folder: Path, *arguments: str) -> Seen:
    """A server whose budget is its memory limit. Skips where there can be none."""
    report = folder / "report.json"
    probe = subprocess.run(
        limited(["true"], LIMIT_BYTES, report, keep_caches=True), capture_output=True, text=True, check=False
    )
    if probe.returncode == EXIT_NO_LIMIT:
        pytest.skip(probe.stderr.strip())
    server = ServeProcess(
        folder / "log",
        *arguments,
        "--memory-budget",
        str(LIMIT_BYTES),
        wrapper=limited([], LIMIT_BYTES, report, keep_caches=True),
        environment={"S2MOE_CACHE_DIR": str(folder / "cache")},
    )
    try:
        seen = ask(server)
    finally:
        server.close()
    assert server.process.returncode == 0, server.log.read_text()
    seen.report = LimitReport.read(report)
    return seen


@pytest.fixture(scope="module")
def under_limit(
    flags: list[str],
    without_limit: Seen,  # first, so that libraries are cached and not charged to this one
    tiny_model_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Seen:
    forget_cached(tiny_model_path)
    return ask_under_limit(tmp_path_factory.mktemp("limited"), *flags)


@pytest.fixture(scope="module")
def without_limit(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("unlimited")
    server = ServeProcess(folder / "log", *flags, environment={"S2MOE_CACHE_DIR": str(folder / "cache")})
    try:
        return ask(server)
    finally:
        server.close()


def test_answers_are_those_of_the_resident_model(under_limit: Seen, without_limit: Seen) -> None:
    assert under_limit.texts == without_limit.texts
    assert all(len(text) > 10 for text in under_limit.texts)


def test_experts_were_read_again_and_again(under_limit: Seen, tiny_model_path: Path) -> None:
    """Otherwise the limit was none."""
    assert under_limit.n_misses > 100
    assert under_limit.done.expert_bytes > tiny_model_path.stat().st_size


def test_metrics_count_what_the_kernel_counts(under_limit: Seen) -> None:
    ready, done = under_limit.ready, under_limit.done
    ratio = (done.expert_bytes - ready.expert_bytes) / (done.kernel_bytes - ready.kernel_bytes)
    assert ratio == pytest.approx(1, abs=0.02)


def test_start_reads_dense_weights_and_the_experts_of_its_warm_up(
    under_limit: Seen, tiny_model_path: Path
) -> None:
    dense_bytes = model_layout(Library(), tiny_model_path)["dense_bytes"]
    ready = under_limit.ready
    assert ready.kernel_bytes - ready.expert_bytes < dense_bytes + SLACK_BYTES


def test_the_budget_is_kept_and_nothing_was_killed(under_limit: Seen) -> None:
    assert under_limit.peak_rss_bytes <= LIMIT_BYTES
    report = under_limit.report
    assert report is not None
    assert report.limit_bytes == LIMIT_BYTES
    assert report.oom_kills == 0
    assert report.peak_bytes is None or report.peak_bytes <= LIMIT_BYTES


def test_the_budget_is_used(under_limit: Seen) -> None:
    """What nothing else needs becomes slots."""
    assert under_limit.peak_rss_bytes > 0.85 * LIMIT_BYTES


def test_buffered_reads_answer_alike_within_the_limit(
    flags: list[str], without_limit: Seen, tiny_model_path: Path, tmp_path: Path
) -> None:
    """The page cache, through which experts come then, counts towards the limit and has to give way."""
    forget_cached(tiny_model_path)
    seen = ask_under_limit(tmp_path, *flags, "--io", "buffered")
    assert seen.texts == without_limit.texts
    assert seen.n_misses > 100
    assert seen.peak_rss_bytes <= LIMIT_BYTES
    assert seen.report is not None
    assert seen.report.oom_kills == 0
    (info,) = [line for line in seen.metrics.splitlines() if line.startswith("s2moe_expert_cache_info{")]
    assert 'io="buffered"' in info

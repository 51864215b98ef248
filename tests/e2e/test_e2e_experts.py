"""A server whose experts do not all fit: its metrics, its answers' share of them, and its next life."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_rig import S2MOE, ServeProcess

N_LAYERS, N_EXPERTS, N_USED = 30, 8, 2
STORY = "Tell me a long story about a river and the people who live beside it."
Serve = Callable[..., ServeProcess]


@pytest.fixture
def serve(tmp_path: Path, tiny_model_path: Path) -> Iterator[Serve]:
    """Starts a server with a cache directory of the test's own and room for most of the experts."""
    started: list[ServeProcess] = []

    def start(*arguments: str, budget: str = "460MiB") -> ServeProcess:
        environment = {"S2MOE_CACHE_DIR": str(tmp_path / "cache"), "S2MOE_KEEP_EXPERT_COUNTS": "true"}
        log = tmp_path / f"log{len(started)}"
        fixed = ("--model", str(tiny_model_path), "--ctx-size", "512", "--memory-budget", budget)
        started.append(ServeProcess(log, *fixed, *arguments, environment=environment))
        started[-1].wait_ready()
        return started[-1]

    yield start
    for process in started:
        process.close()


def total(server: ServeProcess, name: str) -> float:
    """Sum of a counter over its labels."""
    text = server.client.get("/metrics").text
    return sum(map(float, re.findall(rf"^s2moe_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)))


def test_metrics_and_answers_agree_and_counters_outlive_the_engine(serve: Serve) -> None:
    server = serve("--speculation", "off")  # one token per evaluation, so that lookups can be foretold
    before = {name: total(server, f"expert_cache_{name}") for name in ("lookups_total", "load_bytes_total")}
    timings = server.chat(STORY, max_tokens=24).json()["timings"]
    assert timings["predicted_expert_lookups"] == 23 * N_LAYERS * N_USED
    assert N_LAYERS * N_USED < timings["prompt_expert_lookups"] <= N_LAYERS * N_EXPERTS
    n_lookups = timings["predicted_expert_lookups"] + timings["prompt_expert_lookups"]
    n_bytes = timings["predicted_expert_read_bytes"] + timings["prompt_expert_read_bytes"]
    assert total(server, "expert_cache_lookups_total") == before["lookups_total"] + n_lookups
    assert total(server, "expert_cache_load_bytes_total") == before["load_bytes_total"] + n_bytes > 0
    n_loads = total(server, "expert_cache_loads_total")
    assert server.metric('s2moe_expert_cache_load_duration_seconds_count{source="disk"}') == n_loads
    capacity = server.metric('s2moe_expert_cache_capacity_experts{tier="pageable"}')
    assert 0 < server.metric('s2moe_expert_cache_resident_experts{tier="pageable"}') <= capacity
    assert capacity < N_LAYERS * N_EXPERTS
    assert total(server, "memory_budget_bytes") <= 460 << 20
    assert total(server, "expert_cache_info") == 1

    counted = total(server, "expert_cache_lookups_total")
    server.kill_engine()
    while total(server, "engine_restarts_total") == 0:
        time.sleep(0.01)
    server.wait_ready()
    assert server.chat(STORY, max_tokens=4).status_code == 200
    assert total(server, "expert_cache_lookups_total") > counted
    assert total(server, "expert_cache_read_errors_total") == 0


def test_what_a_server_used_warms_its_next_run(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    server.chat(STORY, max_tokens=24)
    warmup = 's2moe_expert_cache_loads_total{source="disk",trigger="warmup"}'
    assert server.metric(warmup) == 0
    server.close()
    (kept,) = (tmp_path / "cache" / "experts").iterdir()
    assert "river" not in kept.read_text()
    # the list of one run can be given to another
    hot = tmp_path / "hot.json"
    kept.rename(hot)
    server = serve("--hot-experts", str(hot))
    assert server.chat(STORY, max_tokens=24).status_code == 200
    assert server.metric(warmup) > 0


def test_list_that_cannot_be_used_ends_the_command_with_one_line(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    hot = tmp_path / "hot.json"
    hot.write_text("{}")
    command = [str(S2MOE), "serve", "--port", "0", "--model", str(tiny_model_path), "--hot-experts", str(hot)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("s2moe: error: ")
    assert f"--hot-experts: {hot} is not a hot-expert list" in last

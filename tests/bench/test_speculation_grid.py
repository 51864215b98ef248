"""How pairs are asked, what a failure costs, and what a killed run keeps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from speculation_rig import FakeServer, Request, options_of

from s2moe.bench.prompts import prompts
from s2moe.bench.serving import ServingError
from s2moe.bench.speculation.grid import FORGET, Grid, GridRun, schedule
from s2moe.bench.speculation.methods import method_named
from s2moe.bench.speculation.results import Results, ResultsError

OFF = options_of("control")
EXACT = options_of("exact")
BALANCED = options_of("balanced")


def grid_of(*methods: str, **changed: Any) -> Grid:
    fields: dict[str, Any] = {"workloads": ("qa",), "limits": (1050,), "n_prompts": 4, "n_tokens": 64}
    return Grid(methods=tuple(map(method_named, methods)), **{**fields, **changed})


def run(
    grid: Grid, results: Results, start: Callable[[int | None, str], FakeServer], save: Any = None
) -> list[str]:
    said: list[str] = []
    GridRun(grid, results, start_server=start, save=save or (lambda: None), say=said.append).run()
    return said


def timed(server: FakeServer, n: int) -> list[Request]:
    """The last n requests, with the numbers of prompts of `qa`."""
    numbers = {conversation[-1]["content"]: str(number) for number, conversation in enumerate(prompts("qa"))}
    return [(numbers.get(text, text), options) for text, options in server.asked[-n:]]


@pytest.mark.parametrize("n", range(1, 11))
def test_each_prompt_is_asked_once_with_and_once_without(n: int) -> None:
    turns = schedule(range(n))
    assert sorted(turns) == [(prompt, is_method) for prompt in range(n) for is_method in (False, True)]


@pytest.mark.parametrize("n", [2, 4, 6, 8, 10])
def test_consecutive_answers_are_to_different_prompts_and_neither_side_is_favoured(n: int) -> None:
    turns = schedule(range(n))
    assert all(one[0] != other[0] for one, other in pairwise(turns))
    first = dict(reversed(turns))
    assert sum(first.values()) == n // 2
    places = {side: [place for place, turn in enumerate(turns) if turn[1] is side] for side in (True, False)}
    assert sum(places[True]) == sum(places[False]), "a steady drift must cancel"


def test_pairs_are_asked_in_turn_on_one_server_after_a_warm_up() -> None:
    servers: list[FakeServer] = []

    def start(limit: int | None, server: str) -> FakeServer:
        assert (limit, server) == (1050, "shared")
        servers.append(FakeServer({OFF: 2.0, EXACT: 1.0}))
        return servers[-1]

    results = Results({})
    said = run(grid_of("exact"), results, start)
    (server,) = servers
    assert server.is_closed
    assert [options for _, options in server.asked[:2]] == [OFF, EXACT], "one answer of each is not counted"
    assert timed(server, len(server.asked) - 2) == [
        *[("0", OFF), ("1", EXACT), ("0", EXACT), ("1", OFF)],
        *[("2", EXACT), ("3", OFF), ("2", OFF), ("3", EXACT)],
    ]
    pairs = results.cells[1050, "qa", "exact"]
    assert [pair.ratio for pair in pairs] == pytest.approx([2.0] * 4)
    assert [pair.method_first for pair in pairs] == [False, True, True, False]
    assert all(pair.same_text for pair in pairs)
    assert any("2.00 (2.00 to 2.00; 4 pairs) × off" in line for line in said)
    assert results.fits == {"1050 MiB, shared": {"r2": 0.97, "mape": 0.04, "n": 300}}


def test_a_prompt_that_is_asked_twice_in_a_row_is_forgotten_in_between() -> None:
    servers = [FakeServer({})]
    run(grid_of("exact", n_prompts=1), Results({}), lambda *_: servers[0])
    assert timed(servers[0], 3) == [("0", OFF), (FORGET[-1]["content"], OFF), ("0", EXACT)]


def test_methods_that_need_another_server_get_one_for_each_limit() -> None:
    started: list[tuple[int | None, str]] = []

    def start(limit: int | None, server: str) -> FakeServer:
        started.append((limit, server))
        return FakeServer({})

    results = Results({})
    grid = grid_of("expert-skip", "balanced", "no-shared-context", limits=(1050, None), n_prompts=2)
    run(grid, results, start)
    assert started == [(1050, "shared"), (1050, "independent"), (None, "shared"), (None, "independent")]
    assert {key[2] for key in results.cells} == {"expert-skip", "balanced", "no-shared-context"}


def test_a_method_that_is_refused_costs_its_own_cells_only() -> None:
    results = Results({})
    run(grid_of("exact", "balanced"), results, lambda *_: FakeServer({}, refused={EXACT}))
    assert list(results.errors) == [(1050, "qa", "exact")]
    assert "refused" in results.errors[1050, "qa", "exact"]
    assert len(results.cells[1050, "qa", "balanced"]) == 4


def test_a_server_that_dies_costs_one_cell_and_is_started_again() -> None:
    servers: list[FakeServer] = []

    def start(limit: int | None, server: str) -> FakeServer:
        servers.append(FakeServer({}, dies_at=5 if not servers else None))
        return servers[-1]

    results = Results({})
    run(grid_of("exact", "balanced"), results, start)
    assert len(servers) == 2
    assert all(server.is_closed for server in servers)
    assert list(results.errors) == [(1050, "qa", "exact")]
    assert list(results.cells) == [(1050, "qa", "balanced")]


def test_a_server_that_does_not_start_is_tried_once_for_each_limit() -> None:
    started: list[int | None] = []

    def start(limit: int | None, server: str) -> FakeServer:
        started.append(limit)
        if limit == 1050:
            raise ServingError("s2moe serve did not become ready")
        return FakeServer({})

    results = Results({})
    run(grid_of("exact", "balanced", limits=(1050, 1500)), results, start)
    assert started == [1050, 1500]
    assert set(results.errors) == {(1050, "qa", "exact"), (1050, "qa", "balanced")}
    assert set(results.cells) == {(1500, "qa", "exact"), (1500, "qa", "balanced")}


def test_a_killed_run_keeps_whole_cells_and_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    killed = FakeServer({OFF: 3.0, EXACT: 2.0})
    results = Results({"build": "b1"})
    n_saved = 0

    def save() -> None:
        nonlocal n_saved
        results.save(path)
        n_saved += 1
        if n_saved == 1:
            raise KeyboardInterrupt

    grid = grid_of("exact", "balanced")
    with pytest.raises(KeyboardInterrupt):
        run(grid, results, lambda *_: killed, save)
    assert killed.is_closed

    continued = Results.resume(path, {"build": "b1"})
    assert continued.cells == {(1050, "qa", "exact"): results.cells[1050, "qa", "exact"]}
    assert grid.pending(continued) == 4
    again = FakeServer({OFF: 3.0, BALANCED: 1.0})
    run(grid, continued, lambda *_: again)
    assert EXACT not in {options for _, options in again.asked}, "what is measured is not asked again"
    assert continued.ratios("exact") == pytest.approx([1.5] * 4)
    assert continued.ratios("balanced") == pytest.approx([3.0] * 4)
    assert grid.pending(continued) == 0
    run(grid, continued, lambda *_: pytest.fail("there is nothing left to start a server for"))


def test_a_run_with_more_prompts_adds_the_missing_ones() -> None:
    results = Results({})
    run(grid_of("exact", n_prompts=2), results, lambda *_: FakeServer({}))
    server = FakeServer({})
    run(grid_of("exact", n_prompts=4), results, lambda *_: server)
    assert {text for text, _ in timed(server, 4)} == {"2", "3"}
    assert [pair.prompt for pair in results.cells[1050, "qa", "exact"]] == [0, 1, 2, 3]


def test_a_failed_cell_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    results = Results({}, errors={(1050, "qa", "exact"): "the connection broke"})
    results.save(path)
    continued = Results.resume(path, {})
    assert continued.errors == results.errors
    run(grid_of("exact"), continued, lambda *_: FakeServer({}))
    assert continued.errors == {}


def test_files_of_another_build_or_of_something_else_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    Results({"build": "b1", "n_tokens": 64}).save(path)
    with pytest.raises(ResultsError, match="another build; choose another --json"):
        Results.resume(path, {"build": "b2", "n_tokens": 64})
    path.write_text("{}")
    with pytest.raises(ResultsError, match="is not a file of this benchmark"):
        Results.load(path)
    with pytest.raises(ResultsError, match="cannot read"):
        Results.load(tmp_path / "missing.json")


def test_the_guess_of_the_time_shrinks_as_cells_are_measured() -> None:
    grid = grid_of("exact", "balanced")
    results = Results({})
    whole = grid.expected_seconds(results)
    run(grid_of("exact"), results, lambda *_: FakeServer({}))
    assert 0 < grid.expected_seconds(results) < whole
    run(grid, results, lambda *_: FakeServer({}))
    assert grid.expected_seconds(results) == 0

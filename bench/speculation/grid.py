"""Runs the grid: a server for each limit and kind of server, and on it pairs of answers in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from s2moe.bench.answer import Answer
from s2moe.bench.http_client import httpx
from s2moe.bench.prompts import prompts
from s2moe.bench.serving import Samples, ServingError
from s2moe.bench.speculation.methods import OFF_OPTIONS, SERVERS, Method
from s2moe.bench.speculation.ratios import estimate
from s2moe.bench.speculation.results import CellKey, Pair, Results, Sample, limit_name
from s2moe.bench.workload import Messages

FORGET: Final[Messages] = [{"role": "user", "content": "Say hello."}]
"""Asked between two answers to one prompt, so that neither finds the prompt in the KV cache."""
N_FORGET_TOKENS: Final = 4
WARM_UP_TOKENS: Final = 64

START_SECONDS: Final = 4.0
PROMPT_SECONDS: Final = 3.5
"""About what a prompt takes under a limit: most experts are read once."""
SECONDS_PER_TOKEN: Final = {1050: 0.1, 1500: 0.065, 2100: 0.045, 2800: 0.03, None: 0.02}
"""About what plain decoding takes on a machine of two cores and a drive of 1 GiB/s."""

FIT_SERIES: Final = {
    "r2": "s2moe_cost_model_r2",
    "mape": "s2moe_cost_model_mape_ratio",
    "n": "s2moe_cost_model_samples",
}


class Server(Protocol):
    """What is measured: `Serving`, or a fake."""

    def chat(self, messages: Messages, n_tokens: int, options: dict[str, Any] | None = None, /) -> Answer: ...

    def metrics(self) -> Samples: ...

    def close(self) -> object: ...


StartServer = Callable[[int | None, str], Server]
"""Starts a server for a limit in MiB and a key of SERVERS. Raises ServingError."""


@dataclass(frozen=True)
class Grid:
    methods: tuple[Method, ...]
    workloads: tuple[str, ...]
    limits: tuple[int | None, ...]
    """MiB, None: no limit."""
    n_prompts: int
    """Of each workload."""
    n_tokens: int

    def keys(self, limit: int | None, server: str) -> Iterator[tuple[CellKey, Method]]:
        """Cells of one server."""
        for workload in self.workloads:
            for method in self.methods:
                if method.server == server:
                    yield (limit, workload, method.name), method

    @property
    def servers(self) -> list[str]:
        wanted = {method.server for method in self.methods}
        return [server for server in SERVERS if server in wanted]

    def pending(self, results: Results) -> int:
        """Pairs that are not measured yet."""
        return sum(
            len(results.missing_prompts(key, self.n_prompts))
            for limit in self.limits
            for server in self.servers
            for key, _ in self.keys(limit, server)
        )

    def expected_seconds(self, results: Results) -> float:
        """A rough guess of what the pending pairs take."""
        seconds = 0.0
        for limit in self.limits:
            token_seconds = SECONDS_PER_TOKEN.get(limit, 0.08)
            answer_seconds = PROMPT_SECONDS * (limit is not None) + 0.5 + self.n_tokens * token_seconds
            for server in self.servers:
                pending = {
                    key: len(results.missing_prompts(key, self.n_prompts))
                    for key, _ in self.keys(limit, server)
                }
                if any(pending.values()):
                    n_warm_up = 1 + len({key[2] for key, n in pending.items() if n})
                    seconds += START_SECONDS + answer_seconds * (2 * sum(pending.values()) + n_warm_up)
        return seconds


def schedule(chosen: Sequence[int]) -> list[tuple[int, bool]]:
    """(prompt, is it the method's turn) in the order of asking.

    Two prompts at a time, so that consecutive answers are to different ones: neither finds its prompt in
    the KV cache, and both find experts that another prompt left. Within the four answers the method has
    the first and the last or the two in the middle, in turn, so that a drifting machine favours neither.
    """
    turns: list[tuple[int, bool]] = []
    for number, begin in enumerate(range(0, len(chosen), 2)):
        block = chosen[begin : begin + 2]
        outer = number % 2 == 1
        first, last = block[0], block[-1]
        if len(block) == 2:
            turns += [(first, outer), (last, not outer), (first, not outer), (last, outer)]
        else:
            turns += [(first, outer), (first, not outer)]
    return turns


class GridRun:
    """One run: fills `results` and calls `save` after each cell."""

    def __init__(
        self,
        grid: Grid,
        results: Results,
        *,
        start_server: StartServer,
        save: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._grid = grid
        self._results = results
        self._start_server = start_server
        self._save = save
        self._say = say
        self._last_prompt: Messages = FORGET
        self._n_done = 0
        self._n_pending = grid.pending(results)
        self._started = time.monotonic()

    def run(self) -> None:
        """A cell that fails is noted in the results, and the run goes on with the next on a new server."""
        for limit in self._grid.limits:
            for server in self._grid.servers:
                self._run_server(limit, server)

    def _run_server(self, limit: int | None, server: str) -> None:
        pending = [
            (key, method)
            for key, method in self._grid.keys(limit, server)
            if self._results.missing_prompts(key, self._grid.n_prompts)
        ]
        running: Server | None = None
        try:
            while pending:
                if running is None:
                    running, pending = self._ready_server(limit, server, pending)
                    continue
                key, method = pending.pop(0)
                try:
                    self._measure_cell(running, key, method)
                    self._results.errors.pop(key, None)
                except ServingError as error:
                    self._fail([key], str(error))
                    running.close()
                    running = None
                self._save()
            if running is not None:
                self._note_fit(running, limit, server)
                self._save()
        finally:
            if running is not None:
                running.close()

    def _ready_server(
        self, limit: int | None, server: str, pending: list[tuple[CellKey, Method]]
    ) -> tuple[Server | None, list[tuple[CellKey, Method]]]:
        """A warm server and the cells that it can measure. None where something failed: then cells fewer than
        `pending`, whose failure is noted."""
        self._say(f"{limit_name(limit)}: starts {' '.join(('s2moe serve', *SERVERS[server]))}")
        self._last_prompt = FORGET
        failing = {method.name for _, method in pending}
        running: Server | None = None
        try:
            running = self._start_server(limit, server)
            conversations = prompts(self._grid.workloads[0])
            running.chat(FORGET, WARM_UP_TOKENS, OFF_OPTIONS)
            methods = {method.name: method for _, method in pending}
            for number, method in enumerate(methods.values()):
                failing = {method.name}
                # from the end, so that what is measured first finds no part of itself
                running.chat(conversations[-1 - number % len(conversations)], WARM_UP_TOKENS, method.options)
            return running, pending
        except BaseException as error:
            if running is not None:
                running.close()
            if not isinstance(error, ServingError):
                raise
            self._fail([key for key, _ in pending if key[2] in failing], str(error))
            self._save()
            return None, [each for each in pending if each[0][2] not in failing]

    def _measure_cell(self, server: Server, key: CellKey, method: Method) -> None:
        limit, workload, name = key
        conversations = prompts(workload)
        samples: dict[tuple[int, bool], Sample] = {}
        first: dict[int, bool] = {}
        for prompt, is_method in schedule(self._results.missing_prompts(key, self._grid.n_prompts)):
            options = method.options if is_method else OFF_OPTIONS
            samples[prompt, is_method] = Sample.of(self._ask(server, conversations[prompt], options))
            first.setdefault(prompt, is_method)
        measured = [
            Pair(prompt, samples[prompt, True], samples[prompt, False], method_first=first[prompt])
            for prompt in first
        ]
        cell = self._results.cells.setdefault(key, [])
        cell += measured
        cell.sort(key=lambda pair: pair.prompt)
        self._n_done += len(measured)
        now = estimate([pair.ratio for pair in cell if pair.counts])
        n_short = sum(not pair.counts for pair in cell)
        short = f", {n_short} answers too short" if n_short else ""
        found = "no pair that counts" if now is None else f"{now} × off"
        self._say(f"{limit_name(limit)}, {workload}, {name}: {found}{short}{self._rest()}")

    def _ask(self, server: Server, messages: Messages, options: dict[str, Any]) -> Answer:
        if messages == self._last_prompt:
            server.chat(FORGET, N_FORGET_TOKENS, OFF_OPTIONS)
        self._last_prompt = messages
        return server.chat(messages, self._grid.n_tokens, options)

    def _rest(self) -> str:
        rest = self._n_pending - self._n_done
        if rest <= 0:
            return ""
        minutes = (time.monotonic() - self._started) / max(1, self._n_done) * rest / 60
        return f"; {rest} pairs left, about {minutes:.0f} min"

    def _fail(self, keys: list[CellKey], text: str) -> None:
        for key in keys:
            limit, workload, name = key
            self._results.errors[key] = text
            self._n_pending -= len(self._results.missing_prompts(key, self._grid.n_prompts))
            self._say(f"{limit_name(limit)}, {workload}, {name}: error: {text}")

    def _note_fit(self, server: Server, limit: int | None, kind: str) -> None:
        """The cost model of verification; nothing where the server does not export it."""
        try:
            samples = server.metrics()
            fit = {name: samples.sum(series, target="verify") for name, series in FIT_SERIES.items()}
        except (KeyError, httpx.HTTPError):
            return
        self._results.fits[f"{limit_name(limit)}, {kind}"] = fit

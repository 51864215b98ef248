"""`s2moe serve`: starts the parts in order, waits for a signal or the engine's end, stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import shlex
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from sse_starlette.sse import AppStatus

from s2moe.engine.messages import WRONG_SETTING_CODES, Configure, ModelInfo, Speculation
from s2moe.server.admission import Admission
from s2moe.server.app import create_app
from s2moe.server.connection import OTHER_CONNECTIONS, Connection
from s2moe.server.engine_client import EngineUnavailableError
from s2moe.server.metrics import Metrics
from s2moe.server.own_memory import own_resident_bytes
from s2moe.server.settings import Settings, SettingsError
from s2moe.server.supervisor import EngineSupervisor

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2

_ENGINE_STOP_SECONDS = 5.0
_ENGINE_SAVE_SECONDS = 20.0
"""The same where conversations are kept: half of it passes before the engine is urged."""
_ANSWER_FLUSH_SECONDS = 3
_CUT_SECONDS = 2.0
_log = logging.getLogger(__name__)


class ServeError(Exception):
    """The server cannot start; the message is one line with the remedy."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: it would close the port at SIGTERM, while we go on answering
    (503 draining, /health, /metrics) until the running request has ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def open_socket(settings: Settings) -> socket.socket:
    """Binds the address; connections are refused until the server listens. Raises ServeError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ServeError(f"--host: cannot resolve {settings.host}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ServeError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
            "choose another --port or --host"
        ) from error
    listener.setblocking(False)
    return listener


def to_configure(settings: Settings, model: Path) -> Configure:
    """Raises SettingsError when the chat template cannot be read."""
    return Configure(
        model_path=str(model),
        n_ctx=settings.ctx_size,
        n_batch=settings.batch_size,
        n_threads=settings.threads,
        device=settings.device,
        chat_template=settings.read_chat_template(),
        memory_budget_bytes=settings.memory_budget,
        vram_budget_bytes=settings.vram_budget,
        front_end_bytes=own_resident_bytes(),
        io=settings.io,
        reader=settings.reader,
        hot_experts_path=_text_of(settings.hot_experts),
        expert_policy=settings.expert_policy,
        keep_expert_counts=settings.keep_expert_counts,
        expert_trace_path=_text_of(settings.expert_trace),
        prompt_cache_bytes=settings.prompt_cache_size,
        prompt_cache_dir=_text_of(settings.prompt_cache_dir),
        speculation=to_speculation(settings),
    )


def to_speculation(settings: Settings) -> Speculation:
    """What the settings leave open travels as None: the preset decides it, or the method."""
    return Speculation(
        method=settings.speculation,
        preset=settings.preset,
        exact=settings.exact or None,
        draft_experts=settings.draft_experts or None,
        max_nodes=settings.max_nodes,
        reuse_strength=settings.reuse_strength,
        reuse_cap=settings.reuse_cap,
        error_budget=settings.error_budget,
        single_token_bias=settings.single_token_bias,
        adaptive=None if settings.adaptive else False,
        reuse_gating=None if settings.reuse_gating else False,
        shared_context=None if settings.shared_context else False,
    )


def _text_of(path: Path | None) -> str | None:
    return None if path is None else str(path.expanduser().absolute())


def check_model(path: Path) -> Path:
    """Raises SettingsError when the file cannot be served at all."""
    path = path.expanduser()
    if path.is_dir():
        raise SettingsError(f"--model: {path} is a directory; name the GGUF file in it")
    if _first_bytes("--model", path, "or omit the option to serve the demo model") != b"GGUF":
        raise SettingsError(
            f"--model: {path} is not a GGUF file; convert it with llama.cpp, or name another one"
        )
    return path.resolve()


def check_hot_experts(path: Path | None) -> None:
    """Raises SettingsError when there is no such file; what is in it the engine judges, which knows the
    model."""
    if path is not None:
        remedy = "make one with `s2moe profile`, or omit the option"
        _first_bytes("--hot-experts", path.expanduser(), remedy)


def _first_bytes(flag: str, path: Path, remedy: str) -> bytes:
    """At most four, of a regular file. Raises SettingsError."""
    remedies = f"check the path, {remedy}"
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise SettingsError(f"{flag}: {path} {what}; {remedies}")
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise SettingsError(f"{flag}: cannot read {path}: {error.strerror}; {remedies}") from error


def run(settings: Settings, listener: socket.socket, configure: Configure) -> int:
    """Serves until a signal or the engine's end; returns the exit code. Raises SettingsError, ServeError."""
    # sse-starlette would cut all streams as soon as a signal comes.
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    # The standard event loop, on which everything is tested: uvloop saves nothing that a token would feel.
    return asyncio.run(_serve(settings, listener, configure))


async def _serve(settings: Settings, listener: socket.socket, configure: Configure) -> int:
    registry = Metrics(model=settings.model_alias, queue_capacity=settings.queue_size)
    supervisor = EngineSupervisor(configure, registry)
    admission = Admission(
        supervisor, registry, capacity=settings.queue_size, timeout_seconds=settings.queue_timeout
    )
    app = create_app(settings, supervisor, registry, admission)
    if settings.read_api_key() is None and not _is_loopback(settings.host):
        _log.warning(
            "anyone who can reach this address can use the server; set --api-key-file",
            extra={"fields": {"host": settings.host}},
        )
    server = make_server(app, most_connections=settings.queue_size + OTHER_CONNECTIONS)
    signals = _Signals()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _until_listening(server, serving)
        await supervisor.start()
        announcing = asyncio.create_task(_announce(settings, listener, supervisor))
        gave_up = asyncio.create_task(supervisor.gave_up.wait())
        stopped = asyncio.create_task(signals.first.wait())
        await asyncio.wait((gave_up, stopped, serving), return_when=asyncio.FIRST_COMPLETED)
        for task in (announcing, gave_up, stopped):
            task.cancel()
        failed = not signals.first.is_set()
        if failed:
            reason = supervisor.exit_message or "the HTTP server ended unexpectedly"
            if settings.log_format == "json":
                _log.critical("%s", reason)
            else:
                print(f"s2moe: error: {reason}", file=sys.stderr, flush=True)
        # Nothing can be finished without an engine.
        patience = 0.0 if failed else settings.shutdown_timeout
        await _either(signals.second.wait(), shut_down_requests(admission, patience))
        await _either(signals.second.wait(), _stop(server, serving))
        server.force_exit = server.should_exit = True
        stop_seconds = _ENGINE_STOP_SECONDS if settings.prompt_cache_dir is None else _ENGINE_SAVE_SECONDS
        await _either(signals.second.wait(), supervisor.stop(stop_seconds))
        await supervisor.stop(0.0)
        if not failed:
            return EXIT_OK
        return EXIT_USAGE if supervisor.fatal_code in WRONG_SETTING_CODES else EXIT_FAILURE
    finally:
        signals.close()
        server.force_exit = server.should_exit = True
        await asyncio.wait((serving,), timeout=_ANSWER_FLUSH_SECONDS)


def make_server(app: object, *, most_connections: int | None = None) -> uvicorn.Server:
    """The HTTP server for `app`, without logs, signals and lifespan of its own. `most_connections`: that may
    be open; None = any number."""
    return _Server(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            http=Connection,
            limit_concurrency=most_connections,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_ANSWER_FLUSH_SECONDS,
        )
    )


async def shut_down_requests(admission: Admission, timeout_seconds: float) -> None:
    """Stops admitting, lets the running request go on for the time given, then ends it with an error. At once
    when this is cancelled."""
    admission.drain()
    if (n := admission.n_running) and timeout_seconds:
        _log.info(
            "waiting up to %g s for %s; a second signal (Ctrl-C) ends %s at once",
            *(timeout_seconds, "1 answer" if n == 1 else f"{n} answers", "it" if n == 1 else "them"),
        )
    try:
        await asyncio.wait_for(admission.idle(), timeout_seconds)
    except asyncio.CancelledError:
        admission.cut()
        raise
    except TimeoutError:
        admission.cut()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(admission.idle(), _CUT_SECONDS)


class _Signals:
    """SIGTERM and SIGINT as two events: the first asks to stop, the second not to wait for anything."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.second.is_set():
            return
        if self.first.is_set():
            _log.info("ending at once, at the second signal", extra={"fields": {"signal": number.name}})
            self.second.set()
        else:
            _log.info("stopping", extra={"fields": {"signal": number.name}})
            self.first.set()

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)


async def _until_listening(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    while not server.started:
        if serving.done():
            try:
                await serving
            except OSError as error:  # two processes may bind an address, but only one can listen on it
                raise ServeError(
                    f"cannot listen: {error.strerror}; choose another --port or --host"
                ) from error
            raise ServeError("the HTTP server ended before it listened")
        await asyncio.sleep(0.005)


async def _stop(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    server.should_exit = True
    await asyncio.shield(serving)


async def _either(*coroutines: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(each) for each in coroutines]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _announce(settings: Settings, listener: socket.socket, supervisor: EngineSupervisor) -> None:
    """Prints the line that a newcomer waits for, once the model is loaded."""
    try:
        await supervisor.wait_ready()
    except EngineUnavailableError:
        return
    url = base_url(settings.host, listener.getsockname()[1])
    model = supervisor.model
    print(ready_text(url, settings.model_alias, model, settings.read_api_key() is not None), flush=True)


def base_url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{shown}:{port}"


def ready_text(url: str, alias: str, model: ModelInfo | None, has_key: bool) -> str:
    about = ""
    if model is not None:
        experts = f", {model.n_expert} experts, {model.n_expert_used} per token" if model.n_expert else ""
        about = f" ({model.architecture}, {model.size_bytes / 1e9:.2f} GB{experts}, {model.n_ctx} tokens)"
    body = {"model": alias, "stream": True, "messages": [{"role": "user", "content": "Hello!"}]}
    key = "-H 'Authorization: Bearer YOUR_KEY' " if has_key else ""
    return (
        f"s2moe is ready: {url}/v1 serves {alias}{about}. Try:\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' {key}"
        f"-d {shlex.quote(msgspec.json.encode(body).decode())}"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""The engine as a process, driven over its socket."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from s2moe.engine import messages as wire
from s2moe.engine.messages import FromEngine, ToEngine


class EngineProcess:
    """A real engine and this end of its socket."""

    def __init__(
        self,
        *,
        stderr: int | None = None,
        program: Sequence[str] = ("-m", "s2moe.engine"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`program`: what Python runs; `environment` adds to this process's."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, *program, "--fd", str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stderr=stderr, env={**os.environ, **(environment or {})}
        )
        theirs.close()
        ours.settimeout(60)
        self.socket = ours
        self._reader = wire.FrameReader(from_engine=True)
        self._received: list[FromEngine] = []

    def send(self, message: ToEngine) -> None:
        self.socket.sendall(wire.encode_frame(message))

    def receive(self) -> FromEngine:
        """The next message; raises EOFError when the engine has gone."""
        while not self._received:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._received += self._reader.feed(data)  # type: ignore[arg-type]
        return self._received.pop(0)

    def receive_until(self, *kinds: type[FromEngine]) -> list[FromEngine]:
        """All messages up to and including the first of the given kinds."""
        messages = [self.receive()]
        while not isinstance(messages[-1], kinds):
            messages.append(self.receive())
        return messages

    def load(self, model: Path, **options: object) -> wire.Ready | wire.Fatal:
        assert isinstance(self.receive(), wire.Hello)
        # the user's cache directory is no place for the habits of tests
        options.setdefault("keep_expert_counts", False)
        # most tests want the same text and counts whatever is in the expert cache
        options.setdefault("speculation", wire.Speculation(method="off"))
        # and evaluate what they ask
        options.setdefault("prompt_cache_bytes", 0)
        self.send(wire.Configure(model_path=str(model), **options))  # type: ignore[arg-type]
        last = self.receive_until(wire.Ready, wire.Fatal)[-1]
        assert isinstance(last, wire.Ready | wire.Fatal)
        return last

    def close(self) -> None:
        self.socket.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()


class Chat:
    """Asks the engine and collects the answer."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self._n_requests = 0

    def request(self, *messages: tuple[str, str], **options: object) -> wire.Generate:
        self._n_requests += 1
        options.setdefault("sampling", wire.Sampling(temperature=0))
        options.setdefault("max_tokens", 32)
        content = [{"role": role, "content": text} for role, text in messages]
        return wire.Generate(
            request_id=f"r{self._n_requests}",
            messages_json=json.dumps(content).encode(),
            **options,  # type: ignore[arg-type]
        )

    def ask(self, *messages: tuple[str, str], **options: object) -> tuple[str, wire.Finished]:
        self.engine.send(self.request(*messages, **options))
        received = self.engine.receive_until(wire.Finished, wire.Failed)
        assert isinstance(received[-1], wire.Finished), received[-1]
        return "".join(m.content for m in received if isinstance(m, wire.Step)), received[-1]

    def fail(self, *messages: tuple[str, str], **options: object) -> wire.Failed:
        self.engine.send(self.request(*messages, **options))
        last = self.engine.receive_until(wire.Finished, wire.Failed)[-1]
        assert isinstance(last, wire.Failed), last
        return last

    def wait_idle(self) -> None:
        for nonce in range(10_000):
            self.engine.send(wire.Ping(nonce=nonce))
            pong = self.engine.receive_until(wire.Pong)[-1]
            if isinstance(pong, wire.Pong) and pong.state == "idle":
                return
            time.sleep(0.001)
        raise AssertionError("the engine did not become idle")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

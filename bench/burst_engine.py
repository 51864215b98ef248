"""An engine process without a model, for measuring the front end.

It speaks the wire protocol like the real one. What it does with a request is the text of its last message:

    burst N          N tokens as fast as the socket takes them
    paced N SECONDS  N tokens, SECONDS apart
    idle             nothing, until the request is aborted

The text of each token is the CLOCK_MONOTONIC time in nanoseconds at which the engine had it, and a space.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator

from s2moe.engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    Configure,
    Finished,
    FrameReader,
    FromEngine,
    Generate,
    Hello,
    ModelInfo,
    Ping,
    Pong,
    Ready,
    Started,
    Step,
    encode_frame,
)

MODEL = ModelInfo(
    architecture="none",
    name="burst",
    quantization="none",
    size_bytes=0,
    n_params=0,
    n_ctx=65536,
    n_ctx_train=65536,
    n_layer=0,
    n_vocab=1,
)


class BurstEngine:
    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._lock = threading.Lock()
        self._configured = threading.Event()
        self._requests: queue.SimpleQueue[Generate] = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._running_id = ""

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        self._send(
            Hello(protocol_version=PROTOCOL_VERSION, pid=os.getpid(), engine_version="0", llama_build="")
        )
        self._configured.wait()
        self._send(Ready(model=MODEL))
        while True:
            self._answer(self._requests.get())

    def _answer(self, request: Generate) -> None:
        name, *arguments = str(json.loads(request.messages_json)[-1]["content"]).split()
        self._send(Started(request_id=request.request_id, n_prompt_tokens=1))
        if name == "idle":
            self._aborted.wait()
            self._send(Finished(request_id=request.request_id, reason="cancelled"))
            return
        n_tokens = int(arguments[0])
        gap_seconds = float(arguments[1]) if name == "paced" else 0.0
        for frame in self._tokens(request.request_id, n_tokens, gap_seconds):
            self._write(frame)
        self._send(
            Finished(
                request_id=request.request_id, reason="stop", n_prompt_tokens=1, n_completion_tokens=n_tokens
            )
        )

    def _tokens(self, request_id: str, n_tokens: int, gap_seconds: float) -> Iterator[bytes]:
        """Frames of tokens: each alone when they are paced, else all at once."""
        if gap_seconds:
            for _ in range(n_tokens):
                time.sleep(gap_seconds)
                yield _token(request_id)
        else:
            yield b"".join([_token(request_id) for _ in range(n_tokens)])

    def _read(self) -> None:
        reader = FrameReader(from_engine=False)
        while data := self._socket.recv(1 << 16):
            for message in reader.feed(data):
                match message:
                    case Ping():
                        self._send(Pong(nonce=message.nonce, state="idle"))
                    case Configure():
                        self._configured.set()
                    case Generate():
                        self._aborted.clear()
                        self._running_id = message.request_id
                        self._requests.put(message)
                    case Abort():
                        if message.request_id == self._running_id:
                            self._aborted.set()
                    case _:
                        os._exit(0)
        os._exit(0)

    def _send(self, message: FromEngine) -> None:
        self._write(encode_frame(message))

    def _write(self, data: bytes) -> None:
        with self._lock:
            self._socket.sendall(data)


def _token(request_id: str) -> bytes:
    now = time.monotonic_ns()
    return encode_frame(Step(request_id=request_id, content=f"{now} ", sampled_ns=now))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--cpu", type=int, help="core to run on")
    arguments = parser.parse_args()
    if arguments.cpu is not None:
        os.sched_setaffinity(0, {arguments.cpu})
    BurstEngine(arguments.fd).run()


if __name__ == "__main__":
    main()

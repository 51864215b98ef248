"""A real child process that speaks the wire protocol and misbehaves on demand.

`--starts a,b,c` gives the behaviour of the first, second, … start (the last one repeats), counted in
`--count-file`; `--on-shutdown` how it takes Shutdown. What a request does is written in the request: its
messages_json is a JSON list of actions, each `name` or `name:argument` (see `Engine.act`). What a query does
is written in its text (see `Engine.reply`).
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from s2moe.engine.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Configure,
    EngineStats,
    Failed,
    Fatal,
    Finished,
    FrameReader,
    FromEngine,
    Generate,
    Hello,
    LoadProgress,
    ModelInfo,
    Ping,
    Plan,
    Pong,
    PrefillProgress,
    QueryFailed,
    Ready,
    Shutdown,
    Started,
    Step,
    Tokenize,
    Tokenized,
    encode_frame,
)

PLAN = Plan(budget_bytes=1, lines=["half of the memory for this", "half for that"], warnings=["not much"])
MEASURED_PLAN = Plan(
    budget_bytes=1, lines=["most of the memory for this", "half for that"], warnings=["not much at all"]
)
MODEL = ModelInfo(
    architecture="llama",
    name="scripted",
    quantization="Q4_0",
    size_bytes=1,
    n_params=1,
    n_ctx=128,
    n_ctx_train=128,
    n_layer=1,
    n_vocab=8,
)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Engine:
    def __init__(self, fd: int, on_shutdown: str) -> None:
        self.socket = socket.socket(fileno=fd)
        self.lock = threading.Lock()
        self.on_shutdown = on_shutdown
        self.configured = threading.Event()
        self.aborted = threading.Event()
        self.requests: queue.Queue[Generate] = queue.Queue()
        self.running = ""
        self.held: list[str] = []
        """Ids of queries without a reply."""
        self.mute = False
        self.byte_by_byte = False
        self.pong_state = "loading"
        self.step_age_seconds = 0.0

    def send(self, message: FromEngine) -> None:
        self.send_raw(encode_frame(message))

    def send_raw(self, data: bytes) -> None:
        with self.lock:
            if self.byte_by_byte:
                for i in range(len(data)):
                    self.socket.sendall(data[i : i + 1])
                    time.sleep(0.0005)
            else:
                self.socket.sendall(data)

    def receive(self) -> bytes:
        try:
            return self.socket.recv(65536)
        except ConnectionResetError:  # the front end died with data unread; as good as EOF
            return b""

    def read(self) -> None:
        reader = FrameReader(from_engine=False)
        while data := self.receive():
            for message in reader.feed(data):
                if isinstance(message, Ping):
                    if not self.mute:
                        self.send(
                            Pong(
                                nonce=message.nonce,
                                state=self.pong_state,
                                step_age_seconds=self.step_age_seconds,
                            )
                        )
                elif isinstance(message, Configure):
                    say(f"configured with {message.model_path}")
                    say(f"front end of {message.front_end_bytes} bytes")
                    self.configured.set()
                elif isinstance(message, Generate):
                    self.running = message.request_id
                    self.aborted.clear()
                    self.requests.put(message)
                elif isinstance(message, Tokenize):
                    self.reply(message.query_id, *message.text.split(":"))
                elif isinstance(message, Abort):
                    if message.request_id == self.running:
                        self.aborted.set()
                elif isinstance(message, Shutdown):
                    say("got Shutdown")
                    if self.on_shutdown == "exit":
                        os._exit(0)
        os._exit(0)

    def start_up(self, behaviour: str) -> None:
        if behaviour == "crash":
            say("boom: scripted crash at start")
            os._exit(3)
        if behaviour == "silent":
            threading.Event().wait()
        version = PROTOCOL_VERSION + (behaviour == "wrong-version")
        self.send(Hello(protocol_version=version, pid=os.getpid(), engine_version="0", llama_build="b0"))
        self.configured.wait()
        if behaviour.startswith("fatal"):
            say("details of the failure")
            retryable = behaviour == "fatal-retryable"
            self.send(
                Fatal(code="model_not_found", message="no such model; check --model", retryable=retryable)
            )
            if behaviour == "fatal-lingers":
                threading.Event().wait()
            os._exit(1)
        if behaviour == "mute-load":
            self.mute = True
            threading.Event().wait()
        if behaviour == "second-hello":
            self.send(Hello(protocol_version=version, pid=os.getpid(), engine_version="0", llama_build="b0"))
        if behaviour == "slow-load":
            self.step_age_seconds = 1e6  # the load is one long native call
            for percent in range(0, 100, 14):
                self.send(LoadProgress(phase="model", fraction=percent / 100, detail="layer"))
                time.sleep(0.05)
            self.step_age_seconds = 0.0
        if behaviour.startswith("planned-"):
            self.send(LoadProgress(phase="plan", fraction=1.0, plan=PLAN))
        if behaviour == "planned-crash":
            say("INFO s2moe.engine.model: all is well")
            os._exit(3)
        self.pong_state = "idle"
        plan = {"planned": PLAN, "planned-measured": MEASURED_PLAN}.get(behaviour)
        self.send(Ready(model=MODEL, load_seconds=0.0, plan=plan))

    def answer(self, request: Generate) -> None:
        for action in json.loads(request.messages_json):
            name, _, argument = action.partition(":")
            if not self.act(request.request_id, name, argument):
                return

    def reply(self, query_id: str, name: str, argument: str = "") -> None:
        if name == "count":
            self.send(Tokenized(query_id=query_id, tokens=list(range(int(argument)))))
        elif name == "fail":
            self.send(QueryFailed(query_id=query_id, code=argument, message="failed as told", param="text"))
        elif name == "hold":
            self.held.append(query_id)
        elif name == "release":
            for held in (*reversed(self.held), query_id):
                self.send(Tokenized(query_id=held, tokens=[int(held)]))
            self.held.clear()
        elif name == "reply-of":
            self.send(Tokenized(query_id=argument, tokens=[]))
            self.send(Tokenized(query_id=query_id, tokens=[]))
        elif name == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise ValueError(f"unknown query {name}")

    def act(self, request_id: str, name: str, argument: str) -> bool:
        """Returns False when the request has ended."""
        if name == "started":
            self.send(Started(request_id=request_id, n_prompt_tokens=3))
        elif name == "prefill":
            self.send(PrefillProgress(request_id=request_id, n_done_tokens=2))
        elif name == "step":
            self.send(Step(request_id=request_id, content=argument))
        elif name == "steps":
            for i in range(int(argument)):
                self.send(Step(request_id=request_id, content=str(i)))
        elif name == "step-of":
            self.send(Step(request_id=argument, content="stale"))
        elif name == "finish-of":
            self.send(Finished(request_id=argument, reason="stop"))
        elif name == "stats":
            self.send(EngineStats(generated_tokens=int(argument)))
        elif name == "finish":
            self.send(Finished(request_id=request_id, reason="stop"))
            return False
        elif name == "fail":
            self.send(Failed(request_id=request_id, code=argument, message="failed as told"))
            return False
        elif name == "until-abort":
            self.aborted.wait()
            time.sleep(float(argument or 0))
            self.send(Finished(request_id=request_id, reason="cancelled"))
            return False
        elif name == "steps-after-abort":
            self.aborted.wait()
            for i in range(int(argument)):
                self.send(Step(request_id=request_id, content=f"late {i}"))
            self.send(Finished(request_id=request_id, reason="cancelled"))
            return False
        elif name == "forever":
            threading.Event().wait()
        elif name == "busy":
            self.pong_state, self.step_age_seconds = "prefill", 0.2
            time.sleep(float(argument))
            self.pong_state, self.step_age_seconds = "idle", 0.0
        elif name == "stuck":
            self.pong_state, self.step_age_seconds = "decode", 1e6
        elif name == "mute":
            self.mute = True
        elif name == "partial":
            self.byte_by_byte = True
        elif name == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "exit":
            os._exit(int(argument))
        elif name == "close":
            self.socket.shutdown(socket.SHUT_RDWR)
        elif name == "say":
            say(argument)
        elif name == "flood":
            sys.stderr.write("x" * 1_000_000 + "\n")
            sys.stderr.write("".join(f"flood {i}\n" for i in range(int(argument))))
            sys.stderr.write("no newline at the end")
            sys.stderr.flush()
        elif name == "garbage":
            self.send_raw(struct.pack(">I", 5) + b"\xc1\xc1\xc1\xc1\xc1")
        elif name == "oversize":
            self.send_raw(struct.pack(">I", MAX_FRAME_BYTES + 1))
        elif name == "describe-fds":
            targets = {}
            for fd in Path("/proc/self/fd").iterdir():
                try:
                    targets[int(fd.name)] = str(fd.readlink())
                except FileNotFoundError:  # the descriptor of the listing itself
                    continue
            self.send(Step(request_id=request_id, content=json.dumps(targets)))
        else:
            raise ValueError(f"unknown action {name}")
        return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--starts", default="normal")
    parser.add_argument("--count-file", type=Path, required=True)
    parser.add_argument("--on-shutdown", choices=["exit", "ignore", "ignore-sigterm-too"], default="exit")
    arguments = parser.parse_args()

    with arguments.count_file.open("a") as file:
        file.write("s")
    behaviours = arguments.starts.split(",")
    behaviour = behaviours[min(arguments.count_file.stat().st_size, len(behaviours)) - 1]
    if arguments.on_shutdown == "ignore-sigterm-too":
        signal.signal(signal.SIGTERM, lambda *_: say("ignored SIGTERM"))
    engine = Engine(arguments.fd, arguments.on_shutdown)
    threading.Thread(target=engine.read, daemon=True).start()
    engine.start_up(behaviour)
    while True:
        # A timeout, so that the main thread gets to run Python's signal handlers.
        try:
            request = engine.requests.get(timeout=0.1)
        except queue.Empty:
            continue
        engine.answer(request)


if __name__ == "__main__":
    main()

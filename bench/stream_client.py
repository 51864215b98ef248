"""A client that reads streams and little else.

Prints one line of JSON: how many content events came, the seconds from the first byte of the answer to its
end, and what each event took from the time that it holds (see burst_engine) until it was here. With
`--hold N` it opens N streams instead, says `open` when each has its status line, and closes them when its
input ends.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import time
from dataclasses import asdict, dataclass, field

_CONTENT = re.compile(rb'"content":"([0-9]+) "')


@dataclass
class StreamReport:
    n_events: int = 0
    seconds: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)


def open_stream(port: int, text: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    body = json.dumps({"stream": True, "messages": [{"role": "user", "content": text}]})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    return connection


def read_stream(port: int, text: str) -> StreamReport:
    connection = open_stream(port, text)
    pieces: list[tuple[int, bytes]] = []
    while data := connection.recv(1 << 16):
        pieces.append((time.monotonic_ns(), data))
    report = StreamReport(seconds=(pieces[-1][0] - pieces[0][0]) / 1e9)
    whole = b"".join(data for _, data in pieces)
    if not whole.startswith(b"HTTP/1.1 200 ") or b"data: [DONE]" not in whole:
        raise SystemExit(f"the answer is not a whole stream: {whole[:200]!r} … {whole[-200:]!r}")
    ends = [(match.end(), int(match[1])) for match in _CONTENT.finditer(whole)]
    report.n_events = len(ends)
    offset, index = 0, 0
    for received_ns, data in pieces:
        offset += len(data)
        while index < len(ends) and ends[index][0] <= offset:
            report.latencies_ms.append((received_ns - ends[index][1]) / 1e6)
            index += 1
    return report


def hold_streams(port: int, text: str, n: int) -> None:
    connections = [open_stream(port, text) for _ in range(n)]
    for connection in connections:
        if not connection.recv(4096).startswith(b"HTTP/1.1 200 "):
            raise SystemExit("a stream was refused")
    print("open", flush=True)
    sys.stdin.read()
    for connection in connections:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("port", type=int)
    parser.add_argument("text")
    parser.add_argument("--hold", type=int, metavar="N")
    parser.add_argument("--cpu", type=int, help="core to run on")
    arguments = parser.parse_args()
    if arguments.cpu is not None:
        os.sched_setaffinity(0, {arguments.cpu})
    if arguments.hold:
        hold_streams(arguments.port, arguments.text, arguments.hold)
    else:
        print(json.dumps(asdict(read_stream(arguments.port, arguments.text))))


if __name__ == "__main__":
    main()

"""Entry point of the engine process: `python -m s2moe.engine --fd N`, started by the front end."""

from __future__ import annotations

import argparse
import ctypes
import logging
import signal
import socket
import sys
from importlib.metadata import PackageNotFoundError, version

from s2moe.engine.channel import Channel
from s2moe.engine.loop import Engine
from s2moe.engine.native import Library, LibraryNotFoundError

PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """The kernel kills this process when the front end ends, whatever its threads are waiting for.

    A front end that ended before this call is seen as EOF on the socket.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _package_version() -> str:
    try:
        return version("s2moe")
    except PackageNotFoundError:
        return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m s2moe.engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the front end")
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args()
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the front end to handle
    logging.basicConfig(
        level=arguments.log_level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    channel = Channel(socket.socket(fileno=arguments.fd))
    try:
        source = Library().build_info()["source"]
    except LibraryNotFoundError:
        source = "unknown"  # loading the model reports why
    return Engine(channel, llama_build=source, version=_package_version()).run()


if __name__ == "__main__":
    sys.exit(main())

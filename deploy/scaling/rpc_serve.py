"""Serves one model whose layers lie on several machines, through llama.cpp's RPC backend.

    build/native/rpc/bin/rpc-server --host 10.0.0.2 --port 50052      # on each worker
    .venv/bin/python deploy/scaling/rpc_serve.py --workers 10.0.0.2:50052,10.0.0.3:50052 --model model.gguf

It is llama-cpp-python's own server (`python -m llama_cpp.server --help`), with plain llama.cpp behind it: no
expert cache, no S²-MoE. Other options go to it. All layers go to the workers unless --n_gpu_layers says how
many.

RPC has no keys and no encryption, and a worker does what it is told: only in a network of your own.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "native"))

from prepare import PrepareError, source_stamp  # noqa: E402
from processes import MAX_PORT  # noqa: E402

FOLDER = ROOT / "build" / "native" / "rpc"
BUILT = FOLDER / "built.txt"
"""Written when a build is complete: its release of llama.cpp."""
DEFAULTS = {
    "--n_gpu_layers": "-1",
    "--port": "8080",
    # else a second request cuts the first one's stream
    "--interrupt_requests": "false",
}


class RpcError(Exception):
    """One line for the person at the terminal."""


def check_build(built: Path = BUILT) -> None:
    """The bindings and the libraries must be of one release. Raises RpcError."""
    if not built.exists():
        raise RpcError("there is no build with RPC; run deploy/scaling/rpc_build.py")
    release = source_stamp(patched=False)
    if (found := built.read_text()) != release:
        raise RpcError(
            f"the build with RPC is of llama.cpp {found}, not {release}; run deploy/scaling/rpc_build.py"
        )


def check_worker(endpoint: str) -> None:
    """llama.cpp ends the process where nobody listens. It cuts at the first colon, and takes a name's first
    IPv4 address. Raises RpcError."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or int(port) > MAX_PORT:
        raise RpcError(f"--workers: write HOST:PORT, not {endpoint!r}")
    if ":" in host:
        raise RpcError(
            f"--workers: {endpoint} is an IPv6 address, which llama.cpp's RPC cannot reach; write an IPv4 "
            "address, or a name that has one"
        )
    try:
        socket.create_connection((socket.gethostbyname(host), int(port)), timeout=5).close()
    except (OSError, UnicodeError) as error:
        raise RpcError(f"--workers: no rpc-server at {endpoint}: {error}; start it there") from None


def register_workers(libraries: Path, endpoints: Sequence[str]) -> None:
    """Makes devices of the workers, before llama.cpp looks for devices."""
    rpc, ggml = (ctypes.CDLL(str(libraries / f"lib{name}.so")) for name in ("ggml-rpc", "ggml"))
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    ggml.ggml_backend_register.restype = None
    for endpoint in endpoints:
        devices = rpc.ggml_backend_rpc_add_server(endpoint.encode())
        if not devices:
            raise RpcError(f"--workers: {endpoint} has no device")
        ggml.ggml_backend_register(devices)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--workers", required=True, metavar="HOST:PORT,…", help="rpc-servers, in the order of the layers"
    )
    arguments, options = parser.parse_known_args()
    endpoints = arguments.workers.split(",")
    libraries = FOLDER / "bin"
    try:
        check_build()
        for endpoint in endpoints:
            check_worker(endpoint)
        register_workers(libraries, endpoints)
    except (RpcError, PrepareError, OSError) as error:
        print(f"rpc_serve: error: {error}", file=sys.stderr)
        return 1

    os.environ["LLAMA_CPP_LIB_PATH"] = str(libraries)
    sys.path.insert(0, str(FOLDER / "python"))
    from llama_cpp.server.__main__ import main as serve

    # the last of an option counts
    sys.argv = [sys.argv[0], *(word for default in DEFAULTS.items() for word in default), *options]
    serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Opens a store on a system that forbids something, and prints what it chose, as JSON.

    python reader_choice.py MODEL READER IO [io_uring]

With the last argument the kernel refuses io_uring to this process, as container runtimes do. Decodes a
token and prints the reader's JSON, or {"status", "message"} of the refusal.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from s2moe.engine.native import NativeError
from s2moe.engine.native_experts import Io, Reader

from stored_model import StoredModel

_IO_URING_SETUP = 425
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_SECCOMP_RET_ALLOW, _SECCOMP_RET_EPERM = 0x7FFF0000, 0x00050001


def forbid_io_uring() -> None:
    instructions = (
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 0, 1, _IO_URING_SETUP),  # skip one instruction when it is another
        (0x06, 0, 0, _SECCOMP_RET_EPERM),
        (0x06, 0, 0, _SECCOMP_RET_ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    program = ctypes.create_string_buffer(struct.pack("HP", len(instructions), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(program)), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def main(model: str, reader: Reader, io: Io, forbidden: str = "") -> None:
    if forbidden:
        forbid_io_uring()
    try:
        with StoredModel(Path(model), reader=reader, io=io) as stored:
            stored.decode([5], position=0)
            print(json.dumps(stored.experts.reader()))
    except NativeError as error:
        print(json.dumps({"status": error.status.name, "message": error.message}))


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]

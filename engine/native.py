"""ctypes binding of native/include/s2moe.h: one Python call per C function, errors as exceptions.

Semantics, units and thread rules are those of the header. llama.h is reached through
llama_cpp.llama_cpp, which loads the same libllama.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from ctypes import POINTER, byref, c_bool, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from s2moe.engine.cuda_probe import DRIVER_REMEDY
from s2moe.engine.messages import ToolCallDelta
from s2moe.engine.stream.answer import Delta

if TYPE_CHECKING:
    import numpy as np

ABI_VERSION = 5
LIBRARY_NAME = "libs2moe.so"


class Status(IntEnum):
    """enum s2moe_status."""

    OK = 0
    INVALID = -1
    TEMPLATE = -2
    GRAMMAR = -3
    ABORTED = -4
    CONTEXT_FULL = -5
    NO_MEMORY = -6
    UNSUPPORTED = -7
    INTERNAL = -8
    IO = -9
    NUMERIC = -10


class NativeError(Exception):
    """A call into libs2moe failed."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class LibraryNotFoundError(Exception):
    """libs2moe is not where it should be, or is of another build; the message says what to do."""


class MoeInfo(ctypes.Structure):
    """struct s2moe_moe_info."""

    _fields_ = (
        ("n_layer", c_int32),
        ("n_moe_layer", c_int32),
        ("n_expert", c_int32),
        ("n_expert_used", c_int32),
    )
    n_layer: int
    n_moe_layer: int
    n_expert: int
    n_expert_used: int


def library_dir() -> Path:
    """Where libs2moe and its libllama lie: $S2MOE_LIB_DIR, else the installed package, else the build tree.

    Raises LibraryNotFoundError when there is none.
    """
    package = Path(__file__).resolve().parent
    candidates = [package.parent / "lib", package.parent / "build" / "native" / "s2moe" / "bin"]
    if explicit := os.environ.get("S2MOE_LIB_DIR"):
        candidates = [Path(explicit)]
    for folder in candidates:
        if (folder / LIBRARY_NAME).exists():
            return folder
    places = ", ".join(str(folder) for folder in candidates)
    raise LibraryNotFoundError(f"{LIBRARY_NAME} is not in {places}; run `make setup` to build it")


def load_llama_cpp() -> ModuleType:
    """Imports llama-cpp-python's low-level bindings on our libllama.

    Must run before anything else imports llama_cpp, which binds its library at import. Raises
    LibraryNotFoundError.
    """
    os.environ["LLAMA_CPP_LIB_PATH"] = str(library_dir())
    try:
        with _without_init("llama_cpp"):
            return importlib.import_module("llama_cpp.llama_cpp")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise _unusable(error) from error


@contextlib.contextmanager
def _without_init(package: str) -> Iterator[None]:
    """Lets modules of a package be imported without its __init__, unless that has run already.

    llama_cpp's imports a whole framework of its own, and numpy: 22 MiB that would be missing for experts.
    """
    spec = importlib.util.find_spec(package)
    if package in sys.modules or spec is None:
        yield
        return
    bare = importlib.util.module_from_spec(spec)
    sys.modules[package] = bare
    try:
        yield
    finally:
        if sys.modules.get(package) is bare:
            del sys.modules[package]


def _unusable(reason: object) -> LibraryNotFoundError:
    text = str(reason).splitlines()[0]
    if "libcuda.so" in text:
        return LibraryNotFoundError(
            f"the native library needs NVIDIA's driver, even on the CPU ({text}); {DRIVER_REMEDY}, or run "
            "`make setup` again"
        )
    if "libcudart" in text or "libcublas" in text:
        return LibraryNotFoundError(
            f"the native library was built for CUDA, whose runtime is missing ({text}); install that version "
            "of it or name its folder in LD_LIBRARY_PATH, or rebuild without CUDA: `make clean setup`"
        )
    return LibraryNotFoundError(f"the native library cannot be used ({text}); run `make setup` again")


_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "s2moe_abi_version": (c_int32, []),
    "s2moe_build_info": (c_char_p, []),
    "llama_print_system_info": (c_char_p, []),
    "s2moe_last_error": (c_char_p, []),
    "s2moe_string_free": (None, [c_void_p]),
    "s2moe_model_moe_info": (None, [c_void_p, POINTER(MoeInfo)]),
    "s2moe_set_n_expert_used": (c_int32, [c_void_p, c_int32]),
    "s2moe_n_expert_used": (c_int32, [c_void_p]),
    "s2moe_set_router_recording": (c_int32, [c_void_p, c_bool]),
    "s2moe_router_ids": (c_int32, [c_void_p, POINTER(POINTER(c_int32)), POINTER(c_int32)]),
    "s2moe_n_graph_reuses": (c_int64, [c_void_p]),
    "s2moe_decode": (c_int32, [c_void_p, POINTER(c_int32), c_int32, c_int32, c_bool]),
    "s2moe_abort_create": (c_void_p, [c_void_p]),
    "s2moe_abort_free": (None, [c_void_p]),
    "s2moe_abort_request": (None, [c_void_p]),
    "s2moe_abort_clear": (None, [c_void_p]),
    "s2moe_sampler_create": (c_void_p, [c_void_p, c_char_p, c_void_p, POINTER(c_int32)]),
    "s2moe_sampler_free": (None, [c_void_p]),
    "s2moe_sampler_sample": (c_int32, [c_void_p, c_void_p, c_int32, POINTER(c_int32)]),
    "s2moe_sampler_accept_prompt": (c_int32, [c_void_p, POINTER(c_int32), c_int32]),
    "s2moe_sampler_seed": (c_uint32, [c_void_p]),
    "s2moe_logprobs": (
        c_int32,
        [c_void_p, c_int32, c_int32, POINTER(c_float), c_int32, POINTER(c_int32), POINTER(c_float)],
    ),
    "s2moe_chat_create": (c_void_p, [c_void_p, c_char_p]),
    "s2moe_chat_free": (None, [c_void_p]),
    "s2moe_chat_apply": (c_int32, [c_void_p, c_char_p, POINTER(c_void_p)]),
    "s2moe_chat_source": (c_int32, [c_void_p, POINTER(c_void_p)]),
    "s2moe_answer_create": (c_void_p, [c_char_p]),
    "s2moe_answer_free": (None, [c_void_p]),
    "s2moe_answer_feed": (c_int32, [c_void_p, c_char_p, c_size_t, c_bool, POINTER(c_void_p)]),
}


def token_array(tokens: list[int]) -> ctypes.Array[c_int32]:
    return (c_int32 * len(tokens))(*tokens)


class Library:
    """libs2moe. Handles of llama.h objects are passed as integers or ctypes pointers."""

    def __init__(self) -> None:
        """Raises LibraryNotFoundError when there is none, or one that this code cannot use."""
        try:
            self._lib = ctypes.CDLL(str(library_dir() / LIBRARY_NAME))
            found = self._lib.s2moe_abi_version()
            if found != ABI_VERSION:
                raise _unusable(f"it has ABI {found}, needed is {ABI_VERSION}")
        except (OSError, AttributeError) as error:
            raise _unusable(error) from error
        self.declare(_PROTOTYPES)

    def declare(self, prototypes: dict[str, tuple[Any, list[Any]]]) -> None:
        """Tells ctypes the types of functions: {name: (result, arguments)}. Raises LibraryNotFoundError."""
        try:
            for name, (restype, argtypes) in prototypes.items():
                function = getattr(self._lib, name)
                function.restype = restype
                function.argtypes = argtypes
        except AttributeError as error:
            raise _unusable(error) from error

    def build_info(self) -> dict[str, Any]:
        """The object that the header describes. Starts no backend, so that a GPU is left alone."""
        info: dict[str, Any] = json.loads(self._lib.s2moe_build_info())
        return info

    def describe_build(self) -> dict[str, Any]:
        """The same, with llama.cpp's line about processors as "system"."""
        return {**self.build_info(), "system": self._lib.llama_print_system_info().decode(errors="replace")}

    def last_error(self) -> str:
        text: bytes = self._lib.s2moe_last_error()
        return text.decode(errors="replace")

    def check(self, status: int) -> None:
        if status != Status.OK:
            raise NativeError(Status(status), self.last_error())

    def take_string(self, pointer: c_void_p) -> bytes:
        try:
            return ctypes.string_at(pointer.value or 0)
        finally:
            self._lib.s2moe_string_free(pointer)

    # Mixture-of-Experts controls

    def moe_info(self, model: Any) -> MoeInfo:
        info = MoeInfo()
        self._lib.s2moe_model_moe_info(model, byref(info))
        return info

    def set_n_expert_used(self, context: Any, n_expert_used: int) -> None:
        self.check(self._lib.s2moe_set_n_expert_used(context, n_expert_used))

    def n_expert_used(self, context: Any) -> int:
        value: int = self._lib.s2moe_n_expert_used(context)
        return value

    def set_router_recording(self, context: Any, record: bool) -> None:
        self.check(self._lib.s2moe_set_router_recording(context, record))

    def router_ids(self, context: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Returns a copy of the ids, int32 [n_layer, n_tokens, k], -1 where nothing was routed."""
        import numpy as np  # the engine does not need it, and it takes 14 MiB

        ids = POINTER(c_int32)()
        shape = (c_int32 * 3)()
        self.check(self._lib.s2moe_router_ids(context, byref(ids), shape))
        return np.ctypeslib.as_array(ids, shape=tuple(shape)).copy()

    def n_graph_reuses(self, context: Any) -> int:
        value: int = self._lib.s2moe_n_graph_reuses(context)
        return value

    # decoding

    def decode(self, context: Any, tokens: list[int], position: int, *, all_logits: bool = False) -> None:
        self.check(self._lib.s2moe_decode(context, token_array(tokens), len(tokens), position, all_logits))

    def logprobs(
        self, context: Any, index: int, token: int, n_top: int
    ) -> tuple[float, list[tuple[int, float]]]:
        """Log probability of `token` at `index` of the last decode, and the `n_top` likeliest tokens with
        theirs, best first."""
        logprob = c_float()
        tokens, logprobs = (c_int32 * n_top)(), (c_float * n_top)()
        self.check(self._lib.s2moe_logprobs(context, index, token, byref(logprob), n_top, tokens, logprobs))
        return logprob.value, list(zip(tokens, logprobs, strict=True))


class _Handle:
    """Owns one object of libs2moe; freed by close()."""

    _free: str

    def __init__(self, library: Library, handle: int | None, failed: Status) -> None:
        self._library = library
        if not handle:
            raise NativeError(failed, library.last_error())
        self.handle: int | None = handle

    @property
    def _lib(self) -> ctypes.CDLL:
        return self._library._lib

    def close(self) -> None:
        if self.handle is not None:
            getattr(self._lib, self._free)(self.handle)
            self.handle = None


class AbortSwitch(_Handle):
    """s2moe_abort: `request` and `clear` may be called from any thread while a native call runs."""

    _free = "s2moe_abort_free"

    def __init__(self, library: Library, context: Any, draft_context: Any = None) -> None:
        """`draft_context`: a second context to be stopped by the same switch; None = there is none."""
        super().__init__(library, library._lib.s2moe_abort_create(context), Status.NO_MEMORY)
        self._second = None if draft_context is None else AbortSwitch(library, draft_context)

    requested = False

    def request(self) -> None:
        self.requested = True
        self._lib.s2moe_abort_request(self.handle)
        if self._second is not None:
            self._second.request()

    def clear(self) -> None:
        self.requested = False
        self._lib.s2moe_abort_clear(self.handle)
        if self._second is not None:
            self._second.clear()

    def close(self) -> None:
        super().close()
        if self._second is not None:
            self._second.close()


class Sampler(_Handle):
    """s2moe_sampler: the state of one answer."""

    _free = "s2moe_sampler_free"

    def __init__(
        self, library: Library, model: Any, params: dict[str, Any], abort: AbortSwitch | None = None
    ) -> None:
        """`abort`: ends the work on a grammar, also that of sample(), and must outlive the sampler.

        Raises NativeError with Status.INVALID (a parameter, named in the message), GRAMMAR or ABORTED.
        """
        status = c_int32()
        switch = None if abort is None else abort.handle
        handle = library._lib.s2moe_sampler_create(model, json.dumps(params).encode(), switch, byref(status))
        super().__init__(library, handle, Status(status.value))
        self._token = c_int32()

    def sample(self, context: Any, index: int = -1) -> int:
        self._library.check(self._lib.s2moe_sampler_sample(self.handle, context, index, byref(self._token)))
        return self._token.value

    def accept_prompt(self, tokens: list[int]) -> None:
        self._library.check(
            self._lib.s2moe_sampler_accept_prompt(self.handle, token_array(tokens), len(tokens))
        )


class ChatTemplate(_Handle):
    """s2moe_chat."""

    _free = "s2moe_chat_free"

    def __init__(self, library: Library, model: Any, template_override: str | None) -> None:
        override = template_override.encode() if template_override else None
        super().__init__(library, library._lib.s2moe_chat_create(model, override), Status.TEMPLATE)

    def apply(self, request_json: bytes) -> bytes:
        """Returns the JSON object that the header describes."""
        result = c_void_p()
        self._library.check(self._lib.s2moe_chat_apply(self.handle, request_json, byref(result)))
        return self._library.take_string(result)

    def source(self) -> str:
        """Jinja source of the template in use."""
        result = c_void_p()
        self._library.check(self._lib.s2moe_chat_source(self.handle, byref(result)))
        return self._library.take_string(result).decode(errors="replace")


class NativeAnswerParser(_Handle):
    """s2moe_answer: an AnswerParser."""

    _free = "s2moe_answer_free"

    def __init__(self, library: Library, chat_json: bytes) -> None:
        super().__init__(library, library._lib.s2moe_answer_create(chat_json), Status.INTERNAL)

    def feed(self, text: str, *, final: bool) -> Delta:
        data = text.encode()
        result = c_void_p()
        status = self._lib.s2moe_answer_feed(self.handle, data, len(data), final, byref(result))
        self._library.check(status)
        delta = json.loads(self._library.take_string(result))
        calls = [ToolCallDelta(**call) for call in delta["tool_calls"]]
        return Delta(delta["content"], delta["reasoning"], calls)

"""GGUF files taken apart and put together byte by byte, also in ways that no writer would."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import gguf

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32
_UINT16, _UINT32, _INT32, _STRING, _ARRAY = 2, 4, 5, 8, 9
_SCALAR_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@dataclass
class Entry:
    """One key-value pair; `value` is encoded as in the file, behind the type."""

    key: bytes
    kind: int
    value: bytes


@dataclass
class Tensor:
    """`dims` as in the file, fastest first. `offset` is where the table says that the data begin, counted
    from the data section; None: where encode() puts them."""

    name: bytes
    dims: list[int]
    kind: int
    data: bytes
    offset: int | None = None


@dataclass
class GgufFile:
    """What a file says. The counts are those of the lists unless given."""

    entries: list[Entry]
    tensors: list[Tensor]
    version: int = 3
    n_tensors: int | None = None
    n_entries: int | None = None
    padding: int = field(default=DEFAULT_ALIGNMENT)
    """Alignment that encode() uses, whatever general.alignment says."""

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.decode(path.read_bytes())

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Takes a well-formed file apart."""
        cursor = _Cursor(data)
        if cursor.take(4) != MAGIC:
            raise ValueError("no GGUF")
        version, n_tensors, n_entries = cursor.unpack("<IQQ")
        entries = [cursor.entry() for _ in range(n_entries)]
        padding = DEFAULT_ALIGNMENT
        for entry in entries:
            if entry.key == b"general.alignment":
                (padding,) = struct.unpack("<I", entry.value)
        table = [cursor.tensor() for _ in range(n_tensors)]
        start = _pad(cursor.position, padding)
        for tensor in table:
            assert tensor.offset is not None
            begin = start + tensor.offset
            tensor.data = data[begin : begin + _n_bytes(tensor)]
            tensor.offset = None
        return cls(entries, table, version=version, padding=padding)

    def tensor(self, name: str) -> Tensor:
        return next(tensor for tensor in self.tensors if tensor.name == name.encode())

    def set_uint16(self, key: str, value: int) -> None:
        self._set(key, _UINT16, struct.pack("<H", value))

    def set_uint32(self, key: str, value: int) -> None:
        self._set(key, _UINT32, struct.pack("<I", value))

    def set_int32(self, key: str, value: int) -> None:
        self._set(key, _INT32, struct.pack("<i", value))

    def _set(self, key: str, kind: int, value: bytes) -> None:
        self.entries = [entry for entry in self.entries if entry.key != key.encode()]
        self.entries.append(Entry(key.encode(), kind, value))

    def header(self) -> bytes:
        """Everything in front of the data section, padded to it."""
        counts = (
            len(self.tensors) if self.n_tensors is None else self.n_tensors,
            len(self.entries) if self.n_entries is None else self.n_entries,
        )
        parts = [MAGIC, struct.pack("<IQQ", self.version, *counts)]
        for entry in self.entries:
            parts += [_string(entry.key), struct.pack("<I", entry.kind), entry.value]
        offset = 0
        for tensor in self.tensors:
            stated = offset if tensor.offset is None else tensor.offset
            parts += [_string(tensor.name), struct.pack("<I", len(tensor.dims))]
            parts += [struct.pack("<Q", dim % 2**64) for dim in tensor.dims]
            parts.append(struct.pack("<IQ", tensor.kind % 2**32, stated % 2**64))
            offset += _pad(len(tensor.data), self.padding)
        header = b"".join(parts)
        return header + bytes(_pad(len(header), self.padding) - len(header))

    def encode(self) -> bytes:
        return self.header() + b"".join(
            tensor.data + bytes(_pad(len(tensor.data), self.padding) - len(tensor.data))
            for tensor in self.tensors
        )


def rewrite(path: Path, change: Callable[[GgufFile], None]) -> None:
    """Applies `change` to the file at `path`."""
    file = GgufFile.read(path)
    change(file)
    path.write_bytes(file.encode())


def split(path: Path, n_files: int) -> list[Path]:
    """Splits a file as llama.cpp's gguf-split names its parts, tensors dealt out in turn, so that the
    matrices of one expert lie in different files. Returns the parts; the first one opens the model."""
    whole = GgufFile.read(path)
    parts = []
    for index in range(n_files):
        part = GgufFile(whole.entries if index == 0 else [], whole.tensors[index::n_files])
        part.padding = whole.padding
        part.set_uint16("split.no", index)
        part.set_uint16("split.count", n_files)
        part.set_int32("split.tensors.count", len(whole.tensors))
        parts.append(path.with_name(f"{path.stem}-{index + 1:05}-of-{n_files:05}.gguf"))
        parts[-1].write_bytes(part.encode())
    return parts


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def take(self, n_bytes: int) -> bytes:
        taken = self._data[self.position : self.position + n_bytes]
        if len(taken) != n_bytes:
            raise ValueError("the file ends inside its header")
        self.position += n_bytes
        return taken

    def unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> bytes:
        return self.take(*self.unpack("<Q"))

    def entry(self) -> Entry:
        key = self.string()
        (kind,) = self.unpack("<I")
        begin = self.position
        self._skip_value(kind)
        return Entry(key, kind, self._data[begin : self.position])

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self.string()
        elif kind == _ARRAY:
            element, n = self.unpack("<IQ")
            for _ in range(n):
                self._skip_value(element)
        else:
            self.take(_SCALAR_SIZES[kind])

    def tensor(self) -> Tensor:
        name = self.string()
        (n_dims,) = self.unpack("<I")
        dims = list(self.unpack(f"<{n_dims}Q"))
        kind, offset = self.unpack("<IQ")
        return Tensor(name, dims, kind, b"", offset)


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _pad(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _n_bytes(tensor: Tensor) -> int:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
    n_values = 1
    for dim in tensor.dims:
        n_values *= dim
    return n_values // block_size * block_bytes

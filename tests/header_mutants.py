"""Damaged GGUF headers, each reproducible from its number."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import gguf

from gguf_bytes import Entry, GgufFile, Tensor

NUMBERS = (
    0, 1, 2, 3, 7, 8, 255, 4096, 65536, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**61, 2**62,
    2**62 + 1, 2**63 - 1, 2**63, 2**64 - 4096, 2**64 - 32, 2**64 - 1,
)  # fmt: skip
_NAMES = (
    b"", b"\0", b"\xff\xfe", b"a" * 63, b"a" * 64, b"a" * 65, b"a" * 100_000, b"blk.0.ffn_up_exps.weight",
    b"blk.1.ffn_gate_up_exps.weight", b"blk.99999.ffn_up_exps.weight", b"blk.-1.ffn_up_exps.weight",
    b"blk.4294967296.ffn_down_exps.weight", b"blk.0.ffn_up_exps.weight\0x", b"%s%n.ffn_up_exps.weight",
)  # fmt: skip
_KEYS = (
    "general.architecture", "general.alignment", "general.name", "qwen3moe.expert_count",
    "qwen3moe.block_count", "qwen3moe.expert_used_count", "qwen3moe.context_length", "split.count",
    "split.no", "split.tensors.count", "tokenizer.ggml.tokens",
)  # fmt: skip

_SIZES = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}


@dataclass(frozen=True)
class Mutant:
    description: str
    header: bytes
    size: int
    """Of the whole file; what follows the header is zeros."""


def mutant(base: GgufFile, number: int) -> Mutant:
    """The mutant of `base`, a small file of architecture qwen3moe, that has this number."""
    rng = random.Random(number)
    file = replace(
        base,
        entries=[replace(entry) for entry in base.entries],
        tensors=[replace(tensor, dims=list(tensor.dims)) for tensor in base.tensors],
    )
    changes: list[str] = []
    if rng.random() < 0.75:
        for change in rng.choices(_CHANGES, k=rng.choice((1, 1, 2, 3))):
            changes.append(change.__name__.lstrip("_"))
            change(rng, file)
    if rng.random() < 0.5:
        _fit_data(file)
    n_data = sum(-(-len(tensor.data) // file.padding) * file.padding for tensor in file.tensors)
    header = file.header()
    if not changes or rng.random() < 0.15:
        damage = rng.choice(_DAMAGES)
        changes.append(damage.__name__.lstrip("_"))
        header = damage(rng, header)
    size = len(header) + n_data
    if rng.random() < 0.1:
        changes.append("cut")
        size = rng.randrange(size + 1)
    return Mutant(f"{number}: {', '.join(changes)}", header[:size], size)


def _fit_data(file: GgufFile) -> None:
    """As many data as the dimensions say, so that what follows is where a reader expects it."""
    for tensor in file.tensors:
        if tensor.kind in _SIZES and 0 <= math.prod(tensor.dims) < 2**22:
            block_size, block_bytes = _SIZES[tensor.kind]
            tensor.data = bytes(math.prod(tensor.dims) // block_size * block_bytes)


# ── changes of a field ──────────────────────────────────────────────────────────────────────────


def _tensor_count(rng: random.Random, file: GgufFile) -> None:
    file.n_tensors = _near(rng, len(file.tensors))


def _entry_count(rng: random.Random, file: GgufFile) -> None:
    file.n_entries = _near(rng, len(file.entries))


def _version(rng: random.Random, file: GgufFile) -> None:
    file.version = rng.choice((0, 1, 2, 4, 0x03000000, 2**31, 2**32 - 1))


def _alignment(rng: random.Random, file: GgufFile) -> None:
    file.set_uint32("general.alignment", rng.choice((0, 1, 2, 3, 31, 48, 64, 4096, 2**30, 2**31, 2**32 - 1)))


def _dim(rng: random.Random, file: GgufFile) -> None:
    tensor = _any_tensor(rng, file)
    index = rng.randrange(len(tensor.dims))
    tensor.dims[index] = _near(rng, tensor.dims[index])


def _number_of_dims(rng: random.Random, file: GgufFile) -> None:
    tensor = _any_tensor(rng, file)
    n = rng.choice((0, 1, 2, 3, 4, 5, 9))
    tensor.dims = (tensor.dims + [1] * n)[:n]


def _four_dims_that_overflow(rng: random.Random, file: GgufFile) -> None:
    _any_tensor(rng, file).dims = [rng.choice((32, 2**16, 2**31, 2**32)) for _ in range(4)]


def _type(rng: random.Random, file: GgufFile) -> None:
    _any_tensor(rng, file).kind = rng.choice((*range(45), 2**31 - 1, 2**31, 2**32 - 1))


def _offset(rng: random.Random, file: GgufFile) -> None:
    tensor = _any_tensor(rng, file)
    tensor.offset = rng.choice((*NUMBERS, -32, -4096, 32 * rng.randrange(2**18), len(tensor.data)))


def _offsets_of_all(rng: random.Random, file: GgufFile) -> None:
    shift = rng.choice((32, 2**20, 2**63, 2**64 - 2**20, 2**64 - 32))
    offset = 0
    for tensor in file.tensors:
        tensor.offset = offset + shift
        offset += -(-len(tensor.data) // file.padding) * file.padding


def _name(rng: random.Random, file: GgufFile) -> None:
    _any_tensor(rng, file).name = rng.choice(_NAMES)


def _duplicate_name(rng: random.Random, file: GgufFile) -> None:
    _any_tensor(rng, file).name = _any_tensor(rng, file).name


def _duplicate_tensor(rng: random.Random, file: GgufFile) -> None:
    file.tensors.append(_any_tensor(rng, file))


def _missing_tensor(rng: random.Random, file: GgufFile) -> None:
    file.tensors.remove(_any_tensor(rng, file))


def _number_of_experts(rng: random.Random, file: GgufFile) -> None:
    file.set_uint32("qwen3moe.expert_count", _near(rng, 8) % 2**32)


def _experts_of_one_tensor(rng: random.Random, file: GgufFile) -> None:
    tensor = rng.choice([tensor for tensor in file.tensors if b"_exps" in tensor.name])
    if len(tensor.dims) == 3:
        tensor.dims[2] = _near(rng, tensor.dims[2])


def _experts_of_all_tensors(rng: random.Random, file: GgufFile) -> None:
    """Without contradiction: as many experts as the key says, of any size, none included."""
    n_experts = rng.choice((0, 1, 2, 4, 8, 2**16, 2**31 - 1, 2**31, 2**32 - 1))
    file.set_uint32("qwen3moe.expert_count", n_experts)
    rows = rng.choice((None, None, 0, 1))
    for tensor in file.tensors:
        if b"_exps" in tensor.name and len(tensor.dims) == 3:
            tensor.dims[1:] = [tensor.dims[1] if rows is None else rows, n_experts]


def _architecture(rng: random.Random, file: GgufFile) -> None:
    name = rng.choice((b"", b"llama", b"\0", b"%s%n", b"\xff" * 9, b"x" * 70_000))
    _replace_entry(rng, file, "general.architecture", Entry(b"", 8, struct.pack("<Q", len(name)) + name))


def _split_count(rng: random.Random, file: GgufFile) -> None:
    file.set_uint16("split.count", _near(rng, 2) % 2**16)
    file.set_uint16("split.no", rng.choice((0, 0, 1, 65535)))


def _length_of_string(rng: random.Random, file: GgufFile) -> None:
    n = rng.choice((*NUMBERS, 2**30, 2**30 - 1, 2**29))
    _replace_entry(rng, file, rng.choice(_KEYS), Entry(b"", 8, struct.pack("<Q", n) + b"text"))


def _length_of_array(rng: random.Random, file: GgufFile) -> None:
    element = rng.choice((*range(13), 2**32 - 1))
    n = rng.choice((*NUMBERS, 2**30, 2**30 - 1, 2**27))
    value = struct.pack("<IQ", element, n) + bytes(rng.randrange(64))
    _replace_entry(rng, file, rng.choice(_KEYS), Entry(b"", 9, value))


def _nested_arrays(rng: random.Random, file: GgufFile) -> None:
    value = struct.pack("<IQ", 9, 1) * rng.choice((1, 2, 20_000)) + struct.pack("<IQI", 4, 1, 1)
    _replace_entry(rng, file, rng.choice(_KEYS), Entry(b"", 9, value))


def _type_of_entry(rng: random.Random, file: GgufFile) -> None:
    kind = rng.choice((*range(14), 2**31, 2**32 - 1))
    _replace_entry(rng, file, rng.choice(_KEYS), Entry(b"", kind, rng.randbytes(rng.randrange(24))))


def _negative_numbers(rng: random.Random, file: GgufFile) -> None:
    file.set_int32(rng.choice(_KEYS), -rng.choice((1, 2, 2**31)))


def _duplicate_entry(rng: random.Random, file: GgufFile) -> None:
    file.entries.append(rng.choice(file.entries))


def _missing_entry(rng: random.Random, file: GgufFile) -> None:
    file.entries.remove(rng.choice(file.entries))


_CHANGES: tuple[Callable[[random.Random, GgufFile], None], ...] = (
    _tensor_count, _entry_count, _version, _alignment, _dim, _dim, _number_of_dims, _four_dims_that_overflow,
    _type, _offset, _offset, _offsets_of_all, _name, _duplicate_name, _duplicate_tensor, _missing_tensor,
    _number_of_experts, _experts_of_one_tensor, _experts_of_all_tensors, _architecture, _split_count,
    _length_of_string, _length_of_array, _nested_arrays, _type_of_entry, _negative_numbers, _duplicate_entry,
    _missing_entry,
)  # fmt: skip


def _any_tensor(rng: random.Random, file: GgufFile) -> Tensor:
    return rng.choice(file.tensors)


def _near(rng: random.Random, value: int) -> int:
    return rng.choice((*NUMBERS, value - 1, value + 1, 2 * value, value // 2, -value)) % 2**64


def _replace_entry(rng: random.Random, file: GgufFile, key: str, entry: Entry) -> None:
    """The entry of `key` takes the type and value of `entry`, in its place or, when it has none, at any."""
    keys = [each.key for each in file.entries]
    index = keys.index(key.encode()) if key.encode() in keys else rng.randrange(len(keys))
    file.entries[index] = replace(entry, key=key.encode())


# ── damage of the bytes ─────────────────────────────────────────────────────────────────────────


def _flipped_bits(rng: random.Random, header: bytes) -> bytes:
    damaged = bytearray(header)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _overwritten_number(rng: random.Random, header: bytes) -> bytes:
    position = rng.randrange(len(header))
    return header[:position] + struct.pack("<Q", rng.choice(NUMBERS)) + header[position + 8 :]


def _removed_bytes(rng: random.Random, header: bytes) -> bytes:
    position = rng.randrange(len(header))
    return header[:position] + header[position + rng.randrange(1, 64) :]


def _inserted_bytes(rng: random.Random, header: bytes) -> bytes:
    position = rng.randrange(len(header))
    return header[:position] + rng.randbytes(rng.randrange(1, 64)) + header[position:]


def _noise(rng: random.Random, header: bytes) -> bytes:
    return header[: rng.choice((0, 4, 8, 24))] + rng.randbytes(rng.randrange(4096))


def _end_of_header(rng: random.Random, header: bytes) -> bytes:
    return header[: rng.randrange(len(header))]


_DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _flipped_bits, _flipped_bits, _overwritten_number, _overwritten_number, _removed_bytes, _inserted_bytes,
    _noise, _end_of_header,
)  # fmt: skip

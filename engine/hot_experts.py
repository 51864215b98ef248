"""Which experts of a model are used most: a list in a file (docs/hot-experts.md)."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from s2moe.engine.regular_file import check_regular

FORMAT: Final = "s2moe-hot-experts"
VERSION: Final = 1
MAX_FILE_BYTES: Final = 64 * 2**20
"""Several times what the largest models need; more is not a list."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class HotExpertsError(Exception):
    """A list cannot be used; the message is one line that begins with the file."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which model a list is about. Only `fingerprint` is compared; the rest is for the reader."""

    fingerprint: str
    """`sha256:` and the hash of the experts' part of the tensor table."""
    architecture: str
    name: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    expert_bytes: int
    """All experts in the file."""

    @classmethod
    def of_layout(cls, layout: Mapping[str, Any]) -> ModelIdentity:
        """`layout`: what s2moe_model_layout() says.

        Where the file lies, how it is split and where in it a tensor begins leave the identity as it is: the
        experts are the same.
        """
        table = {
            **{key: layout[key] for key in ("architecture", "name", "n_layer", "n_expert", "n_expert_used")},
            "layers": [
                [
                    layer["layer"],
                    layer["n_expert"],
                    sorted([part["tensor"], part["type"], part["bytes"]] for part in layer["parts"]),
                ]
                for layer in layout["layers"]
            ],
        }
        digest = hashlib.sha256(msgspec.json.encode(table, order="deterministic")).hexdigest()
        return cls(
            fingerprint=f"sha256:{digest}",
            architecture=layout["architecture"],
            name=layout["name"],
            n_layer=layout["n_layer"],
            n_expert=layout["n_expert"],
            n_expert_used=layout["n_expert_used"],
            expert_bytes=layout["expert_bytes"],
        )

    def describe(self) -> str:
        return (
            f"{self.name or 'an unnamed model'} ({self.architecture}, {self.n_layer} layers, {self.n_expert} "
            f"experts, {self.n_expert_used} used, {self.expert_bytes} bytes of experts)"
        )


class LayerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How often each expert of one layer was used."""

    layer: int
    """Of the model, counted from 0."""
    counts: list[_Count]
    """[n_expert of the layer]"""


class HotExperts(msgspec.Struct, frozen=True, kw_only=True):
    """A hot-expert list, as it is in the file."""

    format: str = FORMAT
    version: int = VERSION
    model: ModelIdentity
    tokens: _Count
    """Generated tokens that were counted."""
    layers: list[LayerCounts]

    def table(self, layers: Sequence[int], n_experts: int) -> list[list[int]]:
        """The counts as `Experts.warm` takes them: [len(layers)][n_experts], zero where the list has none."""
        counts = {each.layer: each.counts for each in self.layers}
        rows = (counts.get(layer, [])[:n_experts] for layer in layers)
        return [row + [0] * (n_experts - len(row)) for row in rows]

    def to_json(self) -> bytes:
        """One layer per line, so that the file can be read and compared."""
        head = msgspec.json.encode(msgspec.structs.replace(self, layers=[]))
        rows = b",\n".join(msgspec.json.encode(layer) for layer in self.layers)
        return head.removesuffix(b"]}") + b"\n" + rows + b"\n]}\n"


_decoder = msgspec.json.Decoder(HotExperts)


def hot_experts_of(
    model: ModelIdentity, layers: Sequence[int], counts: Sequence[Sequence[float]], tokens: float
) -> HotExperts:
    """A list of `counts` [len(layers)][n_experts], rounded to whole numbers."""
    return HotExperts(
        model=model,
        tokens=round(tokens),
        layers=[
            LayerCounts(layer=layer, counts=[round(count) for count in row])
            for layer, row in zip(layers, counts, strict=True)
        ],
    )


def read_hot_experts(path: Path, model: ModelIdentity) -> HotExperts:
    """Raises HotExpertsError when the file cannot be read, is no list, or is about another model."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise HotExpertsError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise HotExpertsError(f"{path} is not a hot-expert list: longer than {MAX_FILE_BYTES >> 20} MiB")
    try:
        hot = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HotExpertsError(f"{path} is not a hot-expert list: {error}") from error
    if hot.format != FORMAT or hot.version != VERSION:
        raise HotExpertsError(
            f"{path} has format {hot.format!r:.40} version {hot.version}, needed is {FORMAT!r} version "
            f"{VERSION}; write it anew with `s2moe profile`"
        )
    if hot.model.fingerprint != model.fingerprint:
        if hot.model.describe() == model.describe():
            raise HotExpertsError(
                f"{path} was written for another model of the same description, {model.describe()}: the "
                f"fingerprint in it is {hot.model.fingerprint!r:.80}, this model's {model.fingerprint!r}; "
                "their experts have other types, names or sizes; write a list for it with `s2moe profile`"
            )
        raise HotExpertsError(
            f"{path} was written for another model, {hot.model.describe()}; this one is {model.describe()}; "
            "write a list for it with `s2moe profile`"
        )
    return hot


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces `path` whole or leaves it as it is. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)  # a device or a pipe, which must not be replaced
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise

"""Which files of a repo are the model that `REPO[:FILE]` names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from s2moe.server.pull.errors import NoSuchFileError
from s2moe.server.pull.progress import size_text

DEFAULT_QUANTISATION: Final = "Q4_K_M"
"""What is taken when nothing is named and the repo has several models, as llama-server's -hf does."""

_PART = re.compile(r"(?P<stem>.+)-(?P<index>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.IGNORECASE)
_QUANTISATION = re.compile(
    r"(?<![a-z0-9])(?:UD-)?(?:I?Q[1-9]_[a-z0-9_]+|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32)(?![a-z0-9])",
    re.IGNORECASE,
)
_NO_MODEL = re.compile(r"(?<![a-z0-9])(?:mmproj|imatrix|eagle3?)(?![a-z0-9])", re.IGNORECASE)
"""GGUF files beside a model: image projectors, importance matrices, draft heads."""

_MOST_NAMES: Final = 3
"""Of files in one line."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repo. `sha256` is None for one that the hub keeps in git, not in its large-file store."""

    path: str
    size_bytes: int
    sha256: str | None

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


@dataclass(frozen=True)
class RemoteModel:
    """One GGUF file, or the parts of a split one in order. `n_parts` is what their names promise."""

    parts: tuple[RemoteFile, ...]
    n_parts: int

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def label(self) -> str:
        """Its quantisation, `Q4_K_M`, as far as the file's name tells; else the name."""
        found = _QUANTISATION.findall(self.parts[0].name)
        return found[-1] if found else self.parts[0].name

    def has_name_part(self, wanted: str) -> bool:
        return (
            re.search(rf"(?:^|[-._/]){re.escape(wanted)}[-./]", self.parts[0].path, re.IGNORECASE) is not None
        )


def choose(files: Iterable[RemoteFile], wanted: str | None, repo: str) -> RemoteModel:
    """The model that `wanted` names: a file of the repo, or a quantisation. Raises NoSuchFileError."""
    models: Sequence[RemoteModel] = models_of(files)
    if not models:
        raise NoSuchFileError(f"{repo} has no GGUF file; look for a repo whose name ends in -GGUF")
    if wanted is not None and wanted.lower().endswith(".gguf"):
        found: Sequence[RemoteModel] = [
            each for each in models if any(wanted in (part.path, part.name) for part in each.parts)
        ]
    else:
        models = [each for each in models if not _NO_MODEL.search(each.parts[0].name)] or models
        found = _by_quantisation(models, wanted)
    if len(found) != 1:
        raise NoSuchFileError(_no_choice(repo, wanted, found, models))
    model = found[0]
    if fault := _numbering_fault(model):
        others = [each for each in models if each is not model]
        raise NoSuchFileError(
            f"{repo}: {model.parts[0].name} is one of {model.n_parts} parts, but the repo {fault}; "
            f"other models of it: {_listed(others) or 'none'}"
        )
    return model


def models_of(files: Iterable[RemoteFile]) -> list[RemoteModel]:
    """The GGUF files, parts of a split one taken together, in the order of their size."""
    whole: list[RemoteModel] = []
    split: defaultdict[tuple[str, int], dict[int, RemoteFile]] = defaultdict(dict)
    for file in files:
        if match := _PART.fullmatch(file.path):
            split[match["stem"], int(match["count"])][int(match["index"])] = file
        elif file.path.lower().endswith(".gguf"):
            whole.append(RemoteModel((file,), 1))
    whole += [
        RemoteModel(tuple(parts[index] for index in sorted(parts)), count)
        for (_, count), parts in split.items()
    ]
    return sorted(whole, key=lambda model: (model.size_bytes, model.parts[0].path))


def _numbering_fault(model: RemoteModel) -> str:
    """How the parts are not those from 1 to n_parts: `lacks m-00002-of-00003.gguf`; empty where they are."""
    matches = [match for part in model.parts if (match := _PART.fullmatch(part.name))]
    found = {int(match["index"]) for match in matches}
    wanted = set(range(1, model.n_parts + 1)) if matches else set()
    for verb, odd in (("lacks", wanted - found), ("has beside them", found - wanted)):
        if odd:
            names = [f"{matches[0]['stem']}-{index:05}-of-{model.n_parts:05}.gguf" for index in sorted(odd)]
            rest = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            return f"{verb} {', '.join(names[:_MOST_NAMES])}{rest}"
    return ""


def _by_quantisation(models: Sequence[RemoteModel], wanted: str | None) -> Sequence[RemoteModel]:
    if wanted is None and len(models) == 1:
        return models
    name = DEFAULT_QUANTISATION if wanted is None else wanted
    # Q4_K_M is a name part of UD-Q4_K_M, too
    exact = [each for each in models if each.label.lower() == name.lower()]
    return exact or [each for each in models if each.has_name_part(name)]


def _no_choice(
    repo: str, wanted: str | None, found: Sequence[RemoteModel], models: Sequence[RemoteModel]
) -> str:
    if wanted is None:
        return f"{repo} has several models; name one, as {repo}:NAME: {_listed(models)}"
    if not found:
        return f"{repo} has no {wanted}; it has {_listed(models)}"
    names = ", ".join(each.parts[0].path for each in found)
    return f"{wanted} names more than one model of {repo}; give the whole file name: {names}"


def _listed(models: Sequence[RemoteModel]) -> str:
    labels = [each.label for each in models]
    names = labels if len(set(labels)) == len(labels) else [each.parts[0].path for each in models]
    return ", ".join(
        f"{name} ({size_text(each.size_bytes)})" for name, each in zip(names, models, strict=True)
    )

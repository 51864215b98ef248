"""Hot-expert lists: the file, and which models it is for."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from fake_experts import LAYOUT, MODEL
from hypothesis import given
from hypothesis import strategies as st

from s2moe.engine.hot_experts import (
    HotExperts,
    HotExpertsError,
    LayerCounts,
    ModelIdentity,
    hot_experts_of,
    read_hot_experts,
    write_atomically,
)

COUNTS = [[5, 0, 2, 9], [1, 1, 0, 14]]
HOT = hot_experts_of(MODEL, (1, 2), COUNTS, 8)


def written(path: Path, **changes: Any) -> Path:
    path.write_bytes(json.dumps({**json.loads(HOT.to_json()), **changes}).encode())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(HotExpertsError) as refused:
        read_hot_experts(path, MODEL)
    message = str(refused.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_file_is_what_the_page_says(tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    write_atomically(path, HOT.to_json())
    document = json.loads(path.read_text())
    assert document == {
        "format": "s2moe-hot-experts",
        "version": 1,
        "model": {
            "fingerprint": MODEL.fingerprint,
            "architecture": "llama",
            "name": "Fake",
            "n_layer": 3,
            "n_expert": 4,
            "n_expert_used": 2,
            "expert_bytes": 7200,
        },
        "tokens": 8,
        "layers": [{"layer": 1, "counts": [5, 0, 2, 9]}, {"layer": 2, "counts": [1, 1, 0, 14]}],
    }
    assert len(path.read_text().splitlines()) == 4
    assert read_hot_experts(path, MODEL) == HOT
    assert [each.name for each in tmp_path.iterdir()] == ["hot.json"]


def test_table_fits_the_cache_whatever_the_list_covers() -> None:
    assert HOT.table((1, 2), 4) == COUNTS
    assert HOT.table((0, 2, 1), 5) == [[0] * 5, [1, 1, 0, 14, 0], [5, 0, 2, 9, 0]]
    assert HOT.table((1,), 2) == [[5, 0]]


@given(st.lists(st.lists(st.integers(0, 2**40), max_size=5), max_size=4))
def test_any_counts_survive_the_file(rows: list[list[int]]) -> None:
    layers = [LayerCounts(layer=i, counts=row) for i, row in enumerate(rows)]
    hot = HotExperts(model=MODEL, tokens=3, layers=layers)
    assert json.loads(hot.to_json())["layers"] == [
        {"layer": layer.layer, "counts": layer.counts} for layer in layers
    ]


def changed(**changes: Any) -> ModelIdentity:
    return ModelIdentity.of_layout({**LAYOUT, **changes})


def test_identity_changes_with_the_experts() -> None:
    layers = copy.deepcopy(LAYOUT["layers"])
    layers[1]["parts"][0]["type"] = "Q8_0"
    others = [
        changed(name="Other"),
        changed(architecture="qwen3moe"),
        changed(n_expert_used=1),
        changed(layers=layers),
        changed(layers=LAYOUT["layers"][:1]),
    ]
    assert len({MODEL.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_identity_does_not_depend_on_where_the_tensors_lie() -> None:
    layers = copy.deepcopy(LAYOUT["layers"])
    for layer in layers:
        for part in layer["parts"]:
            part.update(file=1, offset=123456)
    moved = changed(layers=layers, files=[{"path": "elsewhere/model-00001-of-00002.gguf"}])
    assert moved.fingerprint == MODEL.fingerprint


def test_list_of_another_model_is_refused_and_names_both(tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    other = hot_experts_of(changed(name="Other", n_expert=64), (1,), [[1]], 1)
    path.write_bytes(other.to_json())
    message = refusal(path)
    assert "Other (llama, 3 layers, 64 experts" in message
    assert "Fake (llama, 3 layers, 4 experts" in message
    assert "s2moe profile" in message


def test_files_that_are_no_list_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    assert "No such file" in refusal(path)
    assert "directory" in refusal(tmp_path)
    for data in (b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, HOT.to_json()[:-30]):
        path.write_bytes(data)
        assert "is not a hot-expert list" in refusal(path)
    with path.open("wb") as file:
        file.truncate(65 * 2**20)
    assert "longer than 64 MiB" in refusal(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "other"}, "'other' version 1, needed is 's2moe-hot-experts' version 1"),
        ({"version": 2}, "version 2"),
        ({"version": "1"}, "$.version"),
        ({"tokens": -1}, "$.tokens"),
        ({"model": {}}, "fingerprint"),
        ({"layers": [{"layer": 1, "counts": [1, -1]}]}, "$.layers[0].counts[1]"),
        ({"layers": [{"layer": 1, "counts": [0.5]}]}, "$.layers[0].counts[0]"),
        ({"layers": [{"layer": 1, "counts": [10**30]}]}, "$.layers[0].counts[0]"),
        ({"layers": [{"counts": []}]}, "layer"),
    ],
)
def test_damaged_values_are_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    assert reason in refusal(written(tmp_path / "hot.json", **changes))


def test_unknown_keys_are_for_later_versions(tmp_path: Path) -> None:
    assert read_hot_experts(written(tmp_path / "hot.json", comment="x"), MODEL) == HOT


def test_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hot.json"
    path.write_bytes(b"old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_devices_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    write_atomically(link, b"data")
    assert link.is_symlink()


def test_list_of_a_model_of_the_same_description_names_the_fingerprints(tmp_path: Path) -> None:
    model = {**json.loads(HOT.to_json())["model"], "fingerprint": "sha256:other"}
    message = refusal(written(tmp_path / "hot.json", model=model))
    assert "fingerprint in it is 'sha256:other'" in message
    assert MODEL.fingerprint in message


def test_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert "not a regular file" in refusal(path)

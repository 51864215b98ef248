"""The tables of recommended settings: what they are computed from, and that the documents have no others."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gguf
import pytest

from s2moe.server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MODELS_PAGE = ROOT / "docs" / "models.md"
sys.path.insert(0, str(DEPLOY))

import settings_table  # noqa: E402
from header_only_model import Shape, write_header_only  # noqa: E402

SHAPES = {shape.name: shape for shape in settings_table.read_shapes()}
MIB = 2**20

# Tensors by type as llama.cpp counts them when it loads the published files; for DeepSeek-V2-Lite one of the
# same shape and age, of DeepSeek-Coder-V2-Lite.
PUBLISHED_TENSORS = {
    "DeepSeek-V2-Lite": {"F32": 108, "Q5_0": 14, "Q8_0": 13, "Q4_K": 229, "Q6_K": 13},
    "Qwen3-30B-A3B": {"F32": 241, "Q4_K": 289, "Q6_K": 49},
    "GPT-OSS-20B": {"F32": 289, "Q8_0": 98, "MXFP4": 72},
    "GPT-OSS-120B": {"F32": 433, "Q8_0": 146, "MXFP4": 108},
}

PUBLISHED_GB = {
    name: float(size)
    for name, size in re.findall(
        r"^\| ([\w.-]+) \| `\S+` \| `\S+\.gguf`.*? \| ([\d.]+) GB \|$", MODELS_PAGE.read_text(), re.MULTILINE
    )
}
"""Of the files that docs/models.md names."""


def types_of(shape: Shape) -> dict[str, int]:
    return dict(Counter(shape.tensor_type(name, dims).name for name, dims in shape.tensors()))


@pytest.mark.parametrize("name", PUBLISHED_TENSORS)
def test_types_are_those_of_published_files(name: str) -> None:
    assert types_of(SHAPES[name]) == PUBLISHED_TENSORS[name]


def test_models_of_the_tables_are_those_of_the_page() -> None:
    assert set(SHAPES) == set(PUBLISHED_GB)


def test_kv_cache_of_the_table_is_that_of_the_file_on_the_page() -> None:
    """The file of DeepSeek-V2-Lite is older than compressed KV caches, which take a ninth."""
    (row,) = re.findall(
        r"^\| DeepSeek-V2-Lite \|.*= (\d+) KiB per token, .*$", MODELS_PAGE.read_text(), re.MULTILINE
    )
    shape = SHAPES["DeepSeek-V2-Lite"]
    head_values = shape.head_dim + shape.rope_dim + shape.head_dim
    assert shape.n_layer * shape.n_head_kv * head_values * 2 == int(row) * 1024

    table = settings_table.table_in(settings_table.JETSON_README.read_text(), "models")
    ((kv_mib, n_ctx),) = re.findall(
        r"^\| \[DeepSeek-V2-Lite\].*\| (\d+) MiB for (\d+) \|", table, re.MULTILINE
    )
    assert int(kv_mib) * 1024 == int(row) * int(n_ctx)


def test_short_rows_are_stored_as_llama_cpp_stores_them() -> None:
    shape = SHAPES["DeepSeek-V2-Lite"]  # whose experts have rows of 1408 values, 5.5 blocks of 256
    kinds = {
        layer: shape.tensor_type(f"blk.{layer}.ffn_down_exps.weight", (64, 2048, 1408)).name
        for layer in range(1, 27)
    }
    assert set(kinds.values()) == {"Q5_0", "Q8_0"}
    assert kinds[1] == kinds[26] == "Q8_0"
    assert shape.tensor_type("blk.5.ffn_gate_exps.weight", (64, 1408, 2048)).name == "Q4_K"


def test_file_ends_with_its_last_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_header_only(path, SHAPES["OLMoE-1B-7B"])  # which is read in the least time
    reader = gguf.GGUFReader(path)
    last = max(reader.tensors, key=lambda tensor: int(tensor.data_offset))
    assert 0 <= path.stat().st_size - (last.data_offset + last.n_bytes) < 32


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_file_has_the_whole_size_and_costs_no_disk(shape: Shape, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_header_only(path, shape)
    assert path.stat().st_size / 1e9 == pytest.approx(PUBLISHED_GB[shape.name], rel=0.01)
    assert path.stat().st_blocks * 512 < 32 * MIB


def test_tables_in_the_documents_are_the_computed_ones() -> None:
    command = [sys.executable, str(DEPLOY / "settings_table.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_each_row_of_the_jetson_s_table_is_lines_of_its_settings_file() -> None:
    document = settings_table.JETSON_README
    header, _, *rows = settings_table.table_in(document.read_text(), "jetson").splitlines()
    column = header.split(" | ").index("settings")
    env = document.with_name("s2moe.env").read_text()
    assert rows
    for row in rows:
        board, *cells = row.removeprefix("| ").split(" | ")
        lines = re.findall(r"`([^`]+)`", cells[column - 1])
        settings = Settings.model_validate({name_of(line): line.partition("=")[2] for line in lines})
        assert re.findall(r"^(S2MOE_\w+)=", "\n".join(lines), re.MULTILINE) == [
            "S2MOE_MEMORY_BUDGET", "S2MOE_CTX_SIZE",
        ]  # fmt: skip
        assert all(re.search(rf"^{line.partition('=')[0]}=", env, re.MULTILINE) for line in lines)
        assert settings.memory_budget < int(board.removesuffix(" GB")) * 2**30


def name_of(line: str) -> str:
    return line.partition("=")[0].removeprefix("S2MOE_").lower()


TABLE = "| 16 GB | `S2MOE_MEMORY_BUDGET=12GiB` | 58 % | 180 to 450 MiB |"


@pytest.mark.parametrize(
    "changed",
    [
        TABLE.replace("58 %", "60 %"),
        TABLE.replace("180 to", "178 to"),
        TABLE.replace("12GiB", "13GiB"),
        TABLE.replace("58 %", "all"),
        TABLE + "\n" + TABLE,
        "",
    ],
)
def test_another_table_is_noticed(changed: str) -> None:
    assert settings_table.difference(changed, TABLE)


def test_rounding_is_no_difference() -> None:
    assert settings_table.difference(TABLE.replace("58 %", "59 %").replace("450", "451"), TABLE) == ""


def test_a_document_without_the_markers_is_an_error() -> None:
    with pytest.raises(settings_table.SettingsError, match="lacks the markers"):
        settings_table.table_in("# no table", "jetson")


def test_a_table_is_replaced_in_its_place() -> None:
    document = "before\n<!-- settings_table.py: a -->\nold\n<!-- end of a -->\nafter\n"
    written = settings_table.with_table(document, "a", "| new |")
    assert settings_table.table_in(written, "a") == "| new |"
    assert written.startswith("before\n")
    assert written.endswith("<!-- end of a -->\nafter\n")

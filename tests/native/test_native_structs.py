"""The structs that ctypes binds are those of the header, field by field."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from s2moe.engine.native_experts import (
    ContextMemory,
    ExpertCosts,
    ExpertId,
    ExpertStats,
    ExpertTrace,
    SlotStats,
)

INCLUDE = Path(__file__).parents[2] / "native" / "include"
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "s2moe_expert_stats": ExpertStats,
    "s2moe_device_stats": SlotStats,
    "s2moe_expert_id": ExpertId,
    "s2moe_expert_costs": ExpertCosts,
    "s2moe_expert_trace": ExpertTrace,
    "s2moe_memory": ContextMemory,
}


@pytest.mark.parametrize("name", STRUCTS)
def test_binding_has_the_layout_of_the_header(name: str, tmp_path: Path) -> None:
    bound = STRUCTS[name]
    fields = [field[0] for field in bound._fields_]
    of = f"((struct {name} *) 0)->"
    prints = "".join(
        f'    printf("%zu %zu\\n", offsetof(struct {name}, {field}), sizeof({of}{field}));\n'
        for field in fields
    )
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <s2moe.h>\n"
        f'int main(void) {{\n    printf("%zu 0\\n", sizeof(struct {name}));\n{prints}    return 0;\n}}\n'
    )
    program = tmp_path / "layout"
    subprocess.run(["cc", f"-I{INCLUDE}", "-o", str(program), str(source)], check=True)
    listing = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    (size, _), *in_header = [tuple(map(int, line.split())) for line in listing.splitlines()]
    assert ctypes.sizeof(bound) == size
    for field, layout in zip(fields, in_header, strict=True):
        descriptor = getattr(bound, field)
        assert (descriptor.offset, descriptor.size) == layout, field

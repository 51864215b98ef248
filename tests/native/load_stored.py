"""Opens a model through the expert store, uses it, and prints what its process read and took, as JSON.

    python load_stored.py MODEL

Until the model was ready: "rchar", bytes asked for with read() and its relatives, and "read_bytes", bytes
fetched from the drive, also by page faults. "first_decode_bytes": of the experts that the first decode then
loaded. "anonymous_bytes": memory that the process took from before the load until every slot was in use.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from stored_model import PROMPT, Layout, StoredModel


def counters() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


def anonymous_bytes() -> int:
    """Resident memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def drop_from_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(model: str) -> None:
    path = Path(model)
    layout = Layout.of(path).document
    for file in layout["files"]:
        drop_from_page_cache(Path(file["path"]))
    before = counters()
    memory_before = anonymous_bytes()
    with StoredModel(path, io="direct") as stored:
        loaded = counters()
        stored.decode([5], position=0)
        stats = stored.experts.stats()
        stored.experts.allocate((stored.experts.floor_bytes + Layout.of(path).full_bytes) // 2)
        while stored.experts.stats().evictions == 0:
            for token in range(0, stored.n_vocab - len(PROMPT), len(PROMPT)):
                stored.clear()
                stored.decode(list(range(token, token + len(PROMPT))), position=0)
        capacity_bytes = stored.experts.stats().capacity_bytes
        memory_after = anonymous_bytes()
    result = {key: loaded[key] - before[key] for key in ("rchar", "read_bytes")}
    result["dense_bytes"] = layout["dense_bytes"]
    result["expert_bytes"] = layout["expert_bytes"]
    result["first_decode_bytes"] = sum(stats.load_bytes)
    result["capacity_bytes"] = capacity_bytes
    result["anonymous_bytes"] = memory_after - memory_before
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])

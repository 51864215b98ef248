"""Builds everything native with sanitizers and runs the C++ tests: ASan with UBSan, then TSan.

    .venv/bin/python native/sanitize.py [address,undefined] [thread]

Takes several minutes per sanitizer at the first run, seconds later.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from build import BUILD_ROOT, build
from prepare import NATIVE_DIR, PrepareError, say

DEFINES = {
    "address,undefined": {"CMAKE_BUILD_TYPE": "RelWithDebInfo"},
    # the sanitizer cannot see into libgomp, so ggml uses its own threads
    "thread": {"CMAKE_BUILD_TYPE": "RelWithDebInfo", "GGML_OPENMP": "OFF"},
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "LSAN_OPTIONS": "exitcode=23",
    "TSAN_OPTIONS": f"halt_on_error=1:exitcode=66:suppressions={NATIVE_DIR}/tests/tsan.supp",
}


def run_tests(sanitizer: str, model: Path) -> bool:
    folder = BUILD_ROOT / f"sanitize-{sanitizer.replace(',', '-')}"
    build("s2moe", {"S2MOE_SANITIZE": sanitizer, **DEFINES[sanitizer]}, folder)
    environment = {**os.environ, **OPTIONS, "S2MOE_TEST_MODEL": str(model)}
    command = ["ctest", "--test-dir", str(folder), "--output-on-failure", "--no-tests=error"]
    return subprocess.run(command, env=environment, check=False).returncode == 0


def main() -> int:
    sys.path.insert(0, str(NATIVE_DIR.parent / "tests"))
    from gguf_factory import write_random_model

    sanitizers = sys.argv[1:] or list(DEFINES)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        write_random_model(model, "qwen3moe")
        try:
            failed = [sanitizer for sanitizer in sanitizers if not run_tests(sanitizer, model)]
        except (PrepareError, OSError) as error:
            say(f"error: {error}")
            return 1
    for sanitizer in failed:
        say(f"error: the C++ tests fail under the sanitizer {sanitizer}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

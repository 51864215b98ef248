"""Runs the C++ tests with our code instrumented: ASan with UBSan, then TSan.

    .venv/bin/python native/sanitize.py

Instrumented are libs2moe and the tests, on the llama.cpp of the ordinary build: its heap errors are seen too,
through ASan's allocator, races inside it are not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from build import BUILD_ROOT, build
from prepare import NATIVE_DIR, PrepareError, say

OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "LSAN_OPTIONS": f"suppressions={NATIVE_DIR}/tests/lsan.supp",
    # libgomp's barriers are invisible to the sanitizer, so its threads would seem to race
    "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
}


def main() -> int:
    sys.path.insert(0, str(NATIVE_DIR.parent / "tests"))
    from gguf_factory import write_random_model

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        write_random_model(model, "qwen3moe")
        try:
            build("s2moe", {"S2MOE_SANITIZED_TESTS": "ON"}, BUILD_ROOT / "s2moe")
        except (PrepareError, OSError) as error:
            say(f"error: {error}")
            return 1
        command = [
            "ctest",
            "--test-dir",
            str(BUILD_ROOT / "s2moe"),
            "--output-on-failure",
            "--no-tests=error",
        ]
        command += ["-R", "-(asan|tsan)$"]
        return subprocess.run(
            command, env={**os.environ, **OPTIONS, "S2MOE_TEST_MODEL": str(model)}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())

"""What all tests share: our native library behind llama_cpp, and the demo models."""

from __future__ import annotations

import os

from s2moe.engine.native import library_dir

# llama_cpp binds its library when it is first imported, by whichever test module comes first
os.environ["LLAMA_CPP_LIB_PATH"] = str(library_dir())

pytest_plugins = ["model_fixtures"]

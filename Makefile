# make setup   everything that is missing: Python environment, native libraries
# make serve   setup, then the server on 127.0.0.1:8080 (ARGS="--port 9000 …" passes flags)
# make test    setup, then all tests but those below
# make test-clients   setup, then real clients, each in an environment of its own: see docs/clients.md
# make check   linters, formatters and the type checker
# make cuda    setup with CUDA, for --device cuda (CUDA_ARCHITECTURES="89" picks the chips): see docs/cuda.md
# make cuda-check   compiles the CUDA code, without a GPU and without linking
# make images-check   builds both container images without a GPU and tries them, as root: see docs/docker.md
# make aarch64-check   cross-compiles for ARM and tries that under qemu-user: see docs/docker.md
# make rpc-check   builds llama.cpp with its RPC backend and divides a model between two local workers: see docs/scaling.md
# make native-sanitize   C++ tests under ASan + UBSan, and under TSan

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
CUDA   ?=
CUDA_ARCHITECTURES ?=
BIN    := $(VENV)/bin
STAMPS := $(VENV)/stamps

CUDA_FLAGS   := $(if $(CUDA_ARCHITECTURES),--define "CMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES)")
NATIVE_BUILD := $(if $(CUDA),native/cuda_toolkit.py build $(CUDA_FLAGS),native/build.py)
PIP_INSTALL  := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PIP_FAILED   := { echo "setup: error: pip failed (its reason is above); check the network and run the same command again" >&2; exit 1; }

.PHONY: setup setup-dev native serve test test-clients cuda cuda-check check format rpc-check native-sanitize aarch64-check images-check images-lock clean
.SILENT:

setup: $(STAMPS)/package native

setup-dev: $(STAMPS)/dev native

serve: setup
	exec $(BIN)/s2moe serve $(ARGS)

test: setup-dev
	$(BIN)/python -m pytest $(ARGS)

test-clients: setup-dev
	$(BIN)/python tests/clients/install.py
	$(BIN)/python -m pytest tests/clients $(ARGS)

native: $(STAMPS)/venv
	$(BIN)/python $(NATIVE_BUILD)

cuda:
	$(MAKE) --no-print-directory setup CUDA=1

cuda-check: $(STAMPS)/venv
	$(BIN)/python native/cuda_toolkit.py check

$(STAMPS)/venv:
	command -v $(PYTHON) >/dev/null || { echo "setup: error: there is no $(PYTHON); pass another with make PYTHON=…" >&2; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "setup: error: $(PYTHON) is older than 3.11; pass another with make PYTHON=…" >&2; exit 1; }
	$(PYTHON) native/build.py --check-tools
	echo "setup: creating the Python environment $(VENV)" >&2
	if ! $(PYTHON) -c 'import ensurepip' 2>/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "setup: installing Debian's python3-venv" >&2; \
	  apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null; fi
	$(PYTHON) -m venv $(VENV) || { \
	  echo "setup: error: cannot create $(VENV); on Debian: apt-get install python3-venv" >&2; exit 1; }
	mkdir -p $(STAMPS) && touch $@

# The bindings are installed without their own llama.cpp: they load the one that we build.
$(STAMPS)/bindings: native/llama_cpp.lock | $(STAMPS)/venv
	archive=$$($(BIN)/python native/prepare.py --archive) || exit 1; \
	echo "setup: installing llama-cpp-python's bindings" >&2; \
	CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" $(PIP_INSTALL) "$$archive" || $(PIP_FAILED)
	touch $@

$(STAMPS)/package: pyproject.toml $(STAMPS)/bindings
	echo "setup: installing s2moe and its Python packages" >&2
	$(PIP_INSTALL) --editable . --config-settings=wheel.cmake=false || $(PIP_FAILED)
	touch $@

$(STAMPS)/dev: $(STAMPS)/package
	echo "setup: installing what the tests need" >&2
	$(PIP_INSTALL) --editable '.[dev]' --config-settings=wheel.cmake=false || $(PIP_FAILED)
	touch $@

CPP_FILES = $(foreach folder,cuda include llama ggml src src/chat src/device src/experts src/sampling src/speculation tests,$(wildcard native/$(folder)/*.h native/$(folder)/*.cpp native/$(folder)/*.cu))

# mypy finds the packages under their import names through a folder of links
check: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/typing/s2moe && for package in server engine bench; do \
	  ln -sfn ../../../$$package build/typing/s2moe/$$package; done
	MYPYPATH=build/typing $(BIN)/mypy -p s2moe.server -p s2moe.engine -p s2moe.bench
	MYPYPATH=build/typing:native:deploy:tests $(BIN)/mypy native/prepare.py native/build.py native/cuda_toolkit.py \
	  bench/memlimit deploy/images/check_images.py deploy/images/health.py deploy/settings_table.py deploy/scaling/*.py \
	  deploy/aarch64/check_aarch64.py
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

native-sanitize: setup-dev
	$(BIN)/python native/sanitize.py

rpc-check: setup-dev
	$(BIN)/python deploy/scaling/rpc_build.py
	S2MOE_RPC_CHECK=1 $(BIN)/python -m pytest tests/deploy/test_scaling_rpc.py $(ARGS)

aarch64-check: setup-dev
	$(BIN)/python deploy/aarch64/check_aarch64.py $(ARGS)

images-check:
	$(PYTHON) deploy/images/check_images.py $(ARGS)

# what the images install from the package index, with hashes, for x86-64 and ARM alike
UV_COMPILE = build/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade \
  --no-annotate --custom-compile-command "make images-lock"
images-lock:
	$(PYTHON) -m venv build/lock && build/lock/bin/pip install --quiet uv || $(PIP_FAILED)
	$(UV_COMPILE) --extra pull --no-emit-package llama-cpp-python pyproject.toml deploy/images/requirements.in -o deploy/images/requirements.txt
	$(UV_COMPILE) deploy/images/build-requirements.in -o deploy/images/build-requirements.txt
	$(UV_COMPILE) deploy/images/uv.in -o deploy/images/uv.txt

clean:
	rm -rf build

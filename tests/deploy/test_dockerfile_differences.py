"""The two Dockerfiles are one text but for what is listed here: a change to one is due in the other, too."""

from __future__ import annotations

from difflib import unified_diff
from typing import NamedTuple

import pytest

from documented import ROOT


class Difference(NamedTuple):
    why: str
    orin: str
    rtx_4090: str


DIFFERENCES = (
    Difference(
        "the machine, and its tag",
        """\
# s2moe for a Jetson Orin with JetPack 6 (compute capability 8.7). README.md, section "Docker", says how to use it.
#
#     docker build -f Dockerfile.orin -t s2moe:orin .
""",  # noqa: E501
        """\
# s2moe for x86-64 with an RTX 4090 (compute capability 8.9). README.md, section "Docker", says how to use it.
#
#     docker build -f Dockerfile.4090 -t s2moe:4090 .
""",
    ),
    Difference(
        "what the build arguments mean",
        """\
# Build arguments: BUILD_IMAGE and RUNTIME_IMAGE, one release of one distribution; PYTHON, the CPython that is brought
# along, since JetPack 6's Ubuntu has 3.10, or empty to take the base images' own (3.11 or newer); CUDA_ARCHITECTURES
# for other chips; CUDA=OFF for a server that has the CPU only, on bases without CUDA; CPU, GCC's -march for ARM.
""",  # noqa: E501
        """\
# Build arguments: BUILD_IMAGE and RUNTIME_IMAGE, one release of one distribution with Python 3.11 or newer;
# CUDA_ARCHITECTURES for other chips; CUDA=OFF for a server that has the CPU only, on bases without CUDA;
# CPU=native to optimise for the processor that builds, instead of any with AVX2.
""",
    ),
    Difference(
        "the base images",
        """\
ARG BUILD_IMAGE=nvcr.io/nvidia/l4t-jetpack:r36.4.0
ARG RUNTIME_IMAGE=nvcr.io/nvidia/l4t-cuda:12.6.11-runtime
""",
        """\
ARG BUILD_IMAGE=docker.io/nvidia/cuda:12.6.3-devel-ubuntu24.04
ARG RUNTIME_IMAGE=docker.io/nvidia/cuda:12.6.3-runtime-ubuntu24.04
""",
    ),
    Difference("JetPack's Python is too old: which one is brought along", "ARG PYTHON=3.12.16\n", ""),
    Difference(
        "the same: it is fetched",
        """\
# /opt/python/current is the Python of all environments, here and in the runtime image.
ARG PYTHON
COPY deploy/images/uv.txt deploy/images/
RUN --mount=type=cache,target=/root/.cache \\
    mkdir /opt/python \\
    && if [ -z "$PYTHON" ]; then ln -s /usr /opt/python/current; else \\
      python3 -m venv /opt/uv \\
      && /opt/uv/bin/pip install --only-binary :all: --require-hashes -r deploy/images/uv.txt \\
      && /opt/uv/bin/uv python install --no-bin --install-dir /opt/python "$PYTHON" \\
      && ln -s /opt/python/cpython-"$PYTHON"-* /opt/python/current; \\
    fi

""",
        "",
    ),
    Difference(
        "the same: what builds is made of it",
        "    /opt/python/current/bin/python3 -m venv /opt/build \\\n",
        "    python3 -m venv /opt/build \\\n",
    ),
    Difference(
        "the same: what serves is made of it",
        "    && /opt/python/current/bin/python3 -m venv /opt/s2moe \\\n",
        "    && python3 -m venv /opt/s2moe \\\n",
    ),
    Difference(
        "chip and processor",
        "ARG CUDA_ARCHITECTURES=87-real\nARG CPU=armv8.2-a+dotprod+fp16\n",
        "ARG CUDA_ARCHITECTURES=89-real\nARG CPU=avx2\n",
    ),
    Difference(
        "x86's extensions are a choice of the project's own",
        """\
    esac \\
    && /opt/build/bin/python "$@" --folder /native --define S2MOE_TESTS=OFF \\
      --define S2MOE_NATIVE=OFF --define GGML_CPU_ARM_ARCH="$CPU" \\
""",
        """\
    esac \\
    && case "$CPU" in \\
      native) set -- "$@" --define S2MOE_NATIVE=ON ;; \\
      avx2) set -- "$@" --define S2MOE_NATIVE=OFF ;; \\
      *) echo "CPU is avx2 or native, not $CPU" >&2; exit 1 ;; \\
    esac \\
    && /opt/build/bin/python "$@" --folder /native --define S2MOE_TESTS=OFF \\
""",
    ),
    Difference(
        "the Python that is brought along: the runtime image's own packages",
        """\
ARG PYTHON
RUN apt-get update \\
    && apt-get install -y --no-install-recommends ca-certificates libgomp1 tini $([ -n "$PYTHON" ] || echo python3) \\
""",  # noqa: E501
        """\
RUN apt-get update \\
    && apt-get install -y --no-install-recommends ca-certificates libgomp1 python3 tini \\
""",
    ),
    Difference("the same: it goes into the runtime image", "COPY --from=build /opt/python /opt/python\n", ""),
)


def test_they_differ_in_what_is_listed_and_in_nothing_else() -> None:
    text = (ROOT / "Dockerfile.orin").read_text()
    for why, orin, rtx_4090 in DIFFERENCES:
        assert text.count(orin) == 1, f"Dockerfile.orin has no longer, or not once ({why}):\n{orin}"
        text = text.replace(orin, rtx_4090)
    actual = (ROOT / "Dockerfile.4090").read_text()
    change = unified_diff(
        text.splitlines(),
        actual.splitlines(),
        "Dockerfile.orin, with what is listed",
        "Dockerfile.4090",
        "",
        "",
        1,
        "",
    )
    assert text == actual, "\n".join(change)


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.why)
def test_each_is_one(difference: Difference) -> None:
    assert difference.orin not in (ROOT / "Dockerfile.4090").read_text()

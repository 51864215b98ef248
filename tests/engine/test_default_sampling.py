"""What the engine says about sampling that nobody asked for."""

from __future__ import annotations

import re

import pytest

from s2moe.engine.default_sampling import default_sampling
from s2moe.engine.messages import Sampling
from s2moe.engine.native import library_dir

LLAMA_DEFAULTS = Sampling(
    temperature=0.8,
    top_p=0.95,
    top_k=40,
    min_p=0.05,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repeat_penalty=1.0,
    repeat_last_n=64,
)


def sampling_of(**recommended: str) -> Sampling:
    values = {f"general.sampling.{key}": text for key, text in recommended.items()}
    return default_sampling(lambda key: values.get(key, ""))


def test_without_recommendation_llama_cpps_defaults_stand() -> None:
    assert sampling_of() == LLAMA_DEFAULTS


def test_recommendations_of_the_model_are_taken() -> None:
    sampling = sampling_of(
        temp="0.6", top_p="0.5", top_k="20", min_p="0", penalty_repeat="1.1", penalty_last_n="256"
    )
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.5, 20, 0.0)
    assert (sampling.repeat_penalty, sampling.repeat_last_n) == (1.1, 256)


@pytest.mark.parametrize("text", ["-1", "101", "nan", "inf", "warm", "1e999", ""])
def test_recommendations_out_of_range_do_not_count(text: str) -> None:
    assert sampling_of(temp=text) == LLAMA_DEFAULTS


def test_whole_numbers_stay_whole() -> None:
    top_k = sampling_of(top_k="20.7").top_k
    assert (top_k, type(top_k)) == (20, int)


def test_defaults_are_those_of_the_llama_cpp_that_was_built() -> None:
    header = library_dir().parent / "source" / "common" / "common.h"
    if not header.exists():
        pytest.skip("llama.cpp's source is not below the library")
    body = header.read_text().split("struct common_params_sampling {")[1]
    names = {"temperature": "temp", "repeat_penalty": "penalty_repeat", "repeat_last_n": "penalty_last_n"}
    names |= {"presence_penalty": "penalty_present", "frequency_penalty": "penalty_freq"}
    for field in ("top_p", "top_k", "min_p", *names):
        found = re.search(rf"\b{names.get(field, field)}\s*=\s*([-\d.]+)f?;", body)
        assert found is not None, field
        assert float(found[1]) == getattr(LLAMA_DEFAULTS, field), field

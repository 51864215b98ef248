"""What of a failed step of speculation the operator reads in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from s2moe.engine import messages as wire
from s2moe.engine.decoder import create_decoder
from s2moe.engine.errors import RequestError
from s2moe.engine.model import Model
from s2moe.engine.native import NativeError, Sampler, Status
from s2moe.engine.native_speculation import set_batch_invariance

from speculation_model import write_small_model

PROMPT = [50, 60, 70]
LINE = "cannot be computed with: llama_decode gave -3"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """A random model whose steps of speculation fail."""

    def fail(*_: object) -> list[int]:
        raise NativeError(Status.INTERNAL, "llama_decode gave -3")

    configure = wire.Configure(
        model_path=str(write_small_model(tmp_path)),
        n_ctx=256,
        n_threads=1,
        keep_expert_counts=False,
        prompt_cache_bytes=0,
        speculation=wire.Speculation(),
    )
    made = Model(configure, lambda phase, fraction: None)
    monkeypatch.setattr(made.speculator, "step", fail)
    yield made
    set_batch_invariance(made.library, 0)
    made.close()


def test_internal_error_of_a_step_is_in_the_log(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    sampler = Sampler(model.library, model.handle, {"temperature": 0})
    decoder = create_decoder(model, wire.Generate(request_id="1"), sampler, None)
    model.decode(PROMPT)
    decoder.next_tokens(1)
    with caplog.at_level(logging.ERROR), pytest.raises(RequestError) as caught:
        decoder.next_tokens(4)
    sampler.close()
    assert caught.value.code == "internal"
    assert [record.levelname for record in caplog.records if LINE in record.getMessage()] == ["ERROR"]


def test_what_is_retried_is_not_in_the_log(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    assert model.speculator is not None
    sampler = Sampler(model.library, model.handle, {"temperature": 0})
    with caplog.at_level(logging.ERROR), pytest.raises(RequestError):
        model.speculate(model.speculator, sampler, PROMPT[0], 4, is_retried=True)
    sampler.close()
    assert LINE not in caplog.text

"""Fields of a request that the server does not know: ignored, and named in the log at debug level alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from server_rig import ServerRig

from s2moe.server.logs import JsonFormatter, TextFormatter, fit_for_log

SECRET = "the-secret-prompt"
USER = [{"role": "user", "content": SECRET}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": SECRET},
    "/v1/responses": {"input": SECRET},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": USER},
    "/tokenize": {"content": SECRET},
}


def records_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "s2moe.server.api.body"]


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = vars(record)["fields"]
    return fields


def lines_of(record: logging.LogRecord) -> list[str]:
    return [formatter.format(record) for formatter in (TextFormatter(), JsonFormatter())]


@pytest.mark.parametrize("path", BODIES)
async def test_names_are_logged_and_values_are_not(
    rig: ServerRig, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level(logging.DEBUG, logger="s2moe.server")
    body = {**BODIES[path], "temprature": SECRET, "typical_p": {SECRET: 1}, "model": "m"}
    assert (await rig.http.post(path, json=body)).status_code == 200
    (record,) = records_of(caplog)
    assert record.levelno == logging.DEBUG
    unknown = [name for name in fields_of(record)["names"] if name != "model"]
    assert unknown == ["temprature", "typical_p"]
    for line in lines_of(record):
        assert "temprature" in line
        assert SECRET not in line
    assert not any(SECRET in line for each in caplog.records for line in lines_of(each))


@pytest.mark.parametrize("path", BODIES)
async def test_nothing_is_logged_of_known_fields(
    rig: ServerRig, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level(logging.DEBUG, logger="s2moe.server")
    assert (await rig.http.post(path, json=BODIES[path])).status_code == 200
    assert records_of(caplog) == []


async def test_nothing_is_logged_above_debug(rig: ServerRig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="s2moe.server")
    body = {**BODIES["/v1/completions"], "temprature": 1}
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
    assert records_of(caplog) == []


async def test_names_are_bounded_and_harmless(rig: ServerRig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="s2moe.server")
    hostile = "\x1b[2J\r\nERROR forged \u202e\u2028\x85\x00"
    names = [hostile, "x" * 100_000, *(f"field{i}" for i in range(1000))]
    body = {**BODIES["/v1/completions"], **dict.fromkeys(names, 1)}
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
    (record,) = records_of(caplog)
    fields = fields_of(record)
    assert fields["n_fields"] == 1002
    assert len(fields["names"]) == 16
    assert fields["names"][1] == "x" * 40
    for line in lines_of(record):
        assert len(line) < 2000
        assert line.isprintable()


def test_name_is_shown_as_it_is_where_that_is_harmless() -> None:
    assert fit_for_log("größe_1 €") == "größe_1 €"
    assert fit_for_log("a\nb\x1b") == r"a\nb\x1b"

"""Request ids, API key, CORS, access log."""

from __future__ import annotations

import json
import logging

import pytest
from fake_engine import FakeEngine, endless
from server_rig import CHAT, ServerRig, StartServer, chat

from s2moe.server.engine_client import EngineState
from s2moe.server.logs import JsonFormatter, TextFormatter, configure_logging

KEY = "secret-key"
PROMPT = "the-secret-prompt"


async def test_sane_request_id_is_echoed(rig: ServerRig) -> None:
    for path in ("/health", "/nothing"):
        reply = await rig.http.get(path, headers={"x-request-id": "My.id_1-2"})
        assert reply.headers["x-request-id"] == "My.id_1-2"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", 'a"b', "a;b"])
async def test_other_request_id_is_replaced(rig: ServerRig, given: str) -> None:
    reply = await rig.http.get("/health", headers={b"x-request-id": given.encode("latin-1")})
    assert reply.headers["x-request-id"].startswith("req-")


async def test_request_ids_differ(rig: ServerRig) -> None:
    ids = {(await rig.http.get("/health")).headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": "Bearer"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"x-api-key": "wrong"},
        {"x-api-key": ""},
        {"authorization": b"Bearer \xff\xfe"},
    ],
)
async def test_wrong_key_is_401(start_server: StartServer, headers: dict[str, str]) -> None:
    rig = await start_server(api_key=KEY)
    for path in ("/v1/models", "/metrics", "/version", "/nothing"):
        reply = await rig.http.get(path, headers=headers)
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.headers["x-request-id"]
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert (await rig.post(chat(), headers=headers)).status_code == 401
    assert rig.engine.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY}"},
        {"x-api-key": KEY},
        {"authorization": "Bearer other", "x-api-key": KEY},
    ],
)
async def test_right_key_is_let_in(start_server: StartServer, headers: dict[str, str]) -> None:
    rig = await start_server(api_key=KEY)
    assert (await rig.post(chat(), headers=headers)).status_code == 200


async def test_health_is_open(start_server: StartServer) -> None:
    rig = await start_server(api_key=KEY)
    for path in ("/health", "/v1/health"):
        assert (await rig.http.get(path)).status_code == 200


PREFLIGHT = {
    "origin": "http://localhost:3000",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os,x-request-id",
}


async def test_cors_is_off_by_default(rig: ServerRig) -> None:
    reply = await rig.http.options(CHAT, headers=PREFLIGHT)
    assert reply.status_code == 405
    reply = await rig.post(chat(), headers={"origin": "http://localhost:3000"})
    assert not [name for name in reply.headers if name.startswith("access-control")]


async def test_cors_preflight_passes_for_the_configured_origin_without_a_key(
    start_server: StartServer,
) -> None:
    rig = await start_server(cors_origin=["http://localhost:3000"], api_key=KEY)
    reply = await rig.http.options(CHAT, headers=PREFLIGHT)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert "x-stainless-os" in reply.headers["access-control-allow-headers"]
    assert reply.headers["x-request-id"]
    reply = await rig.post(chat(), headers={"origin": "http://localhost:3000"})
    assert reply.status_code == 401
    assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
    shown = reply.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after", "x-should-retry"} <= set(shown)


async def test_web_page_may_read_an_answer_of_the_last_resort(start_server: StartServer) -> None:
    async def broken() -> None:
        raise KeyError("secret detail")

    rig = await start_server(cors_origin=["http://localhost:3000"])
    rig.app.add_api_route("/broken", broken)
    reply = await rig.http.get("/broken", headers={"origin": "http://localhost:3000"})
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "internal_error"
    assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert reply.headers["x-request-id"]


async def test_cors_refuses_another_origin(start_server: StartServer) -> None:
    rig = await start_server(cors_origin=["http://localhost:3000"])
    reply = await rig.http.options(CHAT, headers={**PREFLIGHT, "origin": "http://evil.example"})
    assert reply.status_code == 400
    assert "access-control-allow-origin" not in reply.headers


def access_records(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [vars(record)["fields"] for record in caplog.records if record.name == "s2moe.server.access"]


async def test_access_log_has_route_status_and_tokens(
    rig: ServerRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await rig.post(chat())
    await rig.http.get("/v1/models/demo")
    await rig.http.get("/v1/unknown")
    await rig.http.get("/health")
    first, second, third, _ = access_records(caplog)
    assert first | {"seconds": 0} == {
        "method": "POST",
        "route": CHAT,
        "status": 200,
        "seconds": 0,
        "prompt_tokens": 10,
        "generated_tokens": 2,
    }
    assert second["route"] == "/v1/models/{model_id:path}"
    assert (third["route"], third["status"]) == ("other", 404)
    levels = {
        vars(r)["fields"]["route"]: r.levelname for r in caplog.records if r.name == "s2moe.server.access"
    }
    assert (levels[CHAT], levels["/health"]) == ("INFO", "DEBUG")


async def test_waiting_for_the_model_is_not_worth_a_line_per_question(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    rig = await start_server(FakeEngine(state=EngineState.LOADING))
    assert (await rig.http.get("/health")).status_code == 503
    assert (await rig.http.get("/nothing")).status_code == 404
    levels = [record.levelname for record in caplog.records if record.name == "s2moe.server.access"]
    assert levels == ["DEBUG", "INFO"]


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_is_499_in_log_and_metrics(
    start_server: StartServer, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO)
    rig = await start_server(FakeEngine(endless))
    client = await rig.connect(chat("x", stream=stream))
    await rig.engine.until_running("x")
    client.leave()
    await rig.until_idle()
    assert (await rig.http.get("/health")).status_code == 200
    assert [fields["status"] for fields in access_records(caplog)] == [499]
    assert await rig.sample("s2moe_http_requests_total", route=CHAT, method="POST", code="499") == 1


@pytest.mark.parametrize("log_prompts", [False, True])
async def test_log_holds_no_prompt_and_no_answer_unless_asked(
    start_server: StartServer, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    configure_logging("debug", "text")
    logging.getLogger().addHandler(caplog.handler)
    rig = await start_server(log_prompts=log_prompts)
    await rig.post(chat(PROMPT))
    await rig.post(chat(PROMPT, stream=True))
    await rig.post(chat(PROMPT, temperature=PROMPT))
    await rig.post({"messages": [{"role": "user", "content": {"a": PROMPT}}]})
    formatter = TextFormatter()
    text = "\n".join(
        formatter.format(record) for record in caplog.records if not record.name.startswith("http")
    )
    assert text.count("s2moe.server.access") == 4
    assert (PROMPT in text) == log_prompts
    assert "Hel" not in text


async def test_log_lines_carry_the_request_id(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    formatted: list[tuple[str, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            formatted.append((JsonFormatter().format(record), TextFormatter().format(record)))

    logger = logging.getLogger("s2moe.server.access")
    handler = Keep()
    logger.addHandler(handler)
    caplog.set_level(logging.INFO)
    try:
        rig = await start_server()
        await rig.post(chat(), headers={"x-request-id": "id-7"})
    finally:
        logger.removeHandler(handler)
    ((as_json, as_text),) = formatted
    entry = json.loads(as_json)
    assert (entry["request_id"], entry["level"], entry["status"]) == ("id-7", "info", 200)
    assert "request_id=id-7" in as_text
    assert "INFO s2moe.server.access request method=POST" in as_text
    assert "\n" not in as_text

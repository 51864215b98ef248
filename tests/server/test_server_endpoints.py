"""/health, /v1/models, /version and the OpenAPI document."""

from __future__ import annotations

from importlib.metadata import version

import msgspec
import pytest
from fake_engine import MODEL, FakeEngine
from fastapi import FastAPI
from pydantic import BaseModel
from server_rig import ServerRig, StartServer
from test_server_errors import assert_error

from s2moe.engine.messages import ServingDevice
from s2moe.server.engine_client import EngineState
from s2moe.server.openapi import add_body_schemas
from s2moe.server.schema import health as schema_of_health


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_is_ok_when_requests_are_taken(rig: ServerRig, path: str) -> None:
    for state in (EngineState.READY, EngineState.BUSY):
        rig.engine.set_state(state)
        reply = await rig.http.get(path)
        assert (reply.status_code, reply.json()) == (200, {"status": "ok"})
    assert (await rig.http.head(path)).status_code == 200


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (EngineState.STARTING, "loading"),
        (EngineState.LOADING, "loading"),
        (EngineState.RESTARTING, "restarting"),
        (EngineState.DEAD, "dead"),
    ],
)
async def test_health_says_why_it_is_not_ok(
    start_server: StartServer, state: EngineState, status: str
) -> None:
    rig = await start_server(FakeEngine(state=state, state_detail="why"))
    reply = await rig.http.get("/health")
    assert (reply.status_code, reply.json()) == (503, {"status": status, "reason": "why"})
    assert int(reply.headers["retry-after"]) >= 1


async def test_health_says_draining(rig: ServerRig) -> None:
    rig.admission.drain()
    reply = await rig.http.get("/health")
    assert (reply.status_code, reply.json()["status"]) == (503, "draining")


async def test_model_card_describes_the_loaded_model(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(model=msgspec.structs.replace(MODEL, n_embd=576)))
    body = (await rig.http.get("/v1/models")).json()
    assert body["object"] == "list"
    (card,) = body["data"]
    assert (card["id"], card["object"]) == ("demo", "model")
    assert (card["capabilities"], card["max_model_len"]) == (["completion"], 4096)
    assert card["meta"] == {
        "n_ctx": 4096,
        "n_ctx_train": 8192,
        "n_params": 1_300_000_000,
        "n_vocab": 49152,
        "n_embd": 576,
        "n_layer": 30,
        "size": 770_000_000,
        "architecture": "llama",
        "quantization": "Q4_0",
        "ftype": "Q4_0",
        "n_expert": 16,
        "n_expert_used": 4,
        "speculation_method": "off",
        "speculation_preset": None,
        "speculation_limit": None,
        "devices": [
            {"kind": "cpu", "name": "Fake CPU", "compute_capability": None, "total_bytes": None},
        ],
    }
    assert (await rig.http.get("/v1/models/demo")).json() == card


async def test_model_card_says_how_the_model_drafts(start_server: StartServer) -> None:
    drafting = {"speculation_method": "s2moe", "speculation_preset": "fast", "speculation_limit": "one chain"}
    rig = await start_server(FakeEngine(model=msgspec.structs.replace(MODEL, **drafting)))
    (card,) = (await rig.http.get("/v1/models")).json()["data"]
    assert drafting.items() <= card["meta"].items()


async def test_model_card_names_every_gpu(start_server: StartServer) -> None:
    gpu = ServingDevice(kind="cuda", name="Fake GPU", compute_capability="8.9", total_bytes=24 << 30)
    rig = await start_server(FakeEngine(model=msgspec.structs.replace(MODEL, devices=[gpu, gpu])))
    (card,) = (await rig.http.get("/v1/models")).json()["data"]
    shown = {"kind": "cuda", "name": "Fake GPU", "compute_capability": "8.9", "total_bytes": 24 << 30}
    assert card["meta"]["devices"] == [shown, shown]
    assert (await rig.http.get("/props")).json()["model"]["devices"] == [shown, shown]


async def test_model_card_says_what_the_model_is_for(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(model=msgspec.structs.replace(MODEL, gives_embeddings=True)))
    (card,) = (await rig.http.get("/v1/models")).json()["data"]
    assert card["capabilities"] == ["embedding"]


async def test_model_name_may_hold_a_slash(start_server: StartServer) -> None:
    rig = await start_server(alias="org/model")
    assert (await rig.http.get("/v1/models/org/model")).json()["id"] == "org/model"


async def test_unknown_model_is_404(rig: ServerRig) -> None:
    reply = await rig.http.get("/v1/models/other")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"
    assert len((await rig.http.get("/v1/models/" + "x" * 30_000)).text) < 400


async def test_models_are_listed_while_loading(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(state=EngineState.LOADING, model=None))
    (card,) = (await rig.http.get("/v1/models")).json()["data"]
    assert (card["id"], card["meta"]) == ("demo", None)
    assert (card["capabilities"], card["max_model_len"]) == ([], None)


async def test_version_names_server_and_engine(rig: ServerRig) -> None:
    assert (await rig.http.get("/version")).json() == {
        "version": version("s2moe"),
        "system_fingerprint": "b1234-abcdef-p1",
    }


async def test_openapi_document_describes_the_chat_request_and_its_errors(rig: ServerRig) -> None:
    document = (await rig.http.get("/openapi.json")).json()
    operation = document["paths"]["/v1/chat/completions"]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    assert schema["required"] == ["messages"]
    options = document["components"]["schemas"]["S2moeOptions"]
    assert options["additionalProperties"] is False
    assert "acceptance_length" in document["components"]["schemas"]["Speculation"]["properties"]
    assert "likeliest" in schema["properties"]["temperature"]["description"]
    assert {"200", "400", "401", "404", "413", "429", "500", "503"} <= set(operation["responses"])
    assert "422" not in operation["responses"]
    assert set(document["paths"]) == {
        "/v1/chat/completions",
        "/v1/chat/completions/input_tokens",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{model_id}",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/apply-template",
        "/detokenize",
        "/health",
        "/metrics",
        "/props",
        "/tokenize",
        "/version",
    }
    text = str(document)
    for name in {part.split("'")[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions/input_tokens", "messages"),
        ("/v1/completions", "prompt"),
        ("/v1/embeddings", "input"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/v1/responses", "input"),
        ("/v1/responses/input_tokens", "input"),
        ("/apply-template", "messages"),
        ("/detokenize", "tokens"),
        ("/tokenize", "content"),
    ],
)
async def test_openapi_document_describes_each_body(rig: ServerRig, path: str, field: str) -> None:
    document = (await rig.http.get("/openapi.json")).json()
    operation = document["paths"][path]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    assert field in schema["required"]
    assert [name for name, each in schema["properties"].items() if "description" not in each] == []
    assert {"400", "401", "413", "429", "500", "503"} <= set(operation["responses"])


async def test_openapi_document_has_a_timeout_for_all_that_waits_for_the_engine(rig: ServerRig) -> None:
    document = (await rig.http.get("/openapi.json")).json()
    posts = {path: item["post"] for path, item in document["paths"].items() if "post" in item}
    assert len(posts) > 8
    assert [path for path, post in posts.items() if "504" not in post["responses"]] == []


async def test_openapi_document_refuses_two_schemas_of_one_name() -> None:
    class Health(BaseModel):
        """Another one than that of /health."""

        other: int

    app = FastAPI()
    app.add_api_route("/health", lambda: None, response_model=schema_of_health.Health)
    add_body_schemas(app, [Health])
    for _ in range(2):
        with pytest.raises(ValueError, match="Health"):
            app.openapi()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("GET", "/tokenize", 405),
        ("PUT", "/v1/embeddings", 405),
        ("DELETE", "/props", 405),
        ("POST", "/v1/health", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/rerank", 404),
        ("GET", "/slots", 404),
        ("POST", "/v1/completions/", 404),
    ],
)
async def test_other_methods_and_routes_get_openai_shaped_errors(
    rig: ServerRig, method: str, path: str, status: int
) -> None:
    reply = await rig.http.request(method, path)
    kinds = {404: ("not_found_error", "not_found"), 405: ("invalid_request_error", "method_not_allowed")}
    assert_error(reply, status, *kinds[status])


async def test_every_route_has_its_series_from_the_start(rig: ServerRig) -> None:
    for method, path in (
        *(("POST", path) for path in ("/v1/completions", "/completions", "/v1/embeddings", "/tokenize")),
        *(("POST", path) for path in ("/detokenize", "/apply-template", "/v1/chat/completions/input_tokens")),
        *(("GET", path) for path in ("/props", "/v1/props", "/v1/health")),
    ):
        assert await rig.sample("s2moe_http_requests_total", route=path, method=method, code="200") == 0

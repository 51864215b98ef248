"""/props: settings without secrets, plan, model."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
from fake_engine import MODEL, FakeEngine
from server_rig import ServerRig, StartServer
from test_server_errors import assert_error

from s2moe.engine.messages import MemoryPool, Plan, Sampling
from s2moe.server.api.props import public_settings
from s2moe.server.engine_client import EngineState
from s2moe.server.settings import Settings

FULL_MODEL = msgspec.structs.replace(
    MODEL,
    n_embd=576,
    chat_template="{{ messages }}",
    bos_token="<s>",
    eos_token="</s>",
    default_sampling=Sampling(temperature=0.6, top_p=0.9, top_k=20, min_p=0.0, repeat_penalty=1.0),
)
PLAN = Plan(
    budget_bytes=1000,
    budget_source="--memory-budget",
    pools=[MemoryPool(pool="weights", budget_bytes=600), MemoryPool(pool="kv", budget_bytes=400)],
    n_slots=12,
    n_experts=480,
    n_cycle_slots=60,
    floor_bytes=900,
    lines=["memory budget 1000"],
    warnings=["tight"],
)


async def test_props_describe_what_is_served(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(model=FULL_MODEL, plan=PLAN), alias="tiny", queue_size=3)
    reply = await rig.http.get("/props")
    assert reply.status_code == 200
    body = reply.json()
    card = (await rig.http.get("/v1/models/tiny")).json()
    settings = body.pop("settings")
    assert (settings["alias"], settings["queue_size"], settings["ctx_size"]) == ("tiny", 3, 0)
    assert body == {
        "default_generation_settings": {
            "n_ctx": 4096,
            "params": {
                "temperature": 0.6,
                "top_p": 0.9,
                "top_k": 20,
                "min_p": 0.0,
                "repeat_penalty": 1.0,
                "repeat_last_n": None,
                "presence_penalty": None,
                "frequency_penalty": None,
                "seed": None,
            },
        },
        "total_slots": 1,
        "model_alias": "tiny",
        "model_path": None,
        "model": card["meta"],
        "modalities": {"vision": False, "audio": False, "video": False},
        "chat_template": "{{ messages }}",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "build_info": "b1234-abcdef-p1",
        "version": version("s2moe"),
        "is_sleeping": False,
        "plan": {
            "budget_bytes": 1000,
            "budget_source": "--memory-budget",
            "floor_bytes": 900,
            "pools": {"weights": 600, "kv": 400},
            "n_experts": 480,
            "n_slots": 12,
            "n_cycle_slots": 60,
            "lines": ["memory budget 1000"],
            "warnings": ["tight"],
        },
    }
    assert (await rig.http.get("/v1/props")).json() == reply.json()


async def test_props_hold_no_secret_and_no_folder(start_server: StartServer, tmp_path: Path) -> None:
    rig = await start_server(
        model=tmp_path / "some-model.gguf",
        chat_template_file=tmp_path / "template.jinja",
        hot_experts=tmp_path / "hot.json",
        api_key="sesame-key",
    )
    reply = await rig.http.get("/props", headers=rig.key_headers)
    assert "sesame-key" not in reply.text
    assert str(tmp_path) not in reply.text
    body = reply.json()
    assert body["model_path"] == body["settings"]["model"] == "some-model.gguf"
    assert body["settings"]["chat_template_file"] == "template.jinja"
    assert not [name for name in body["settings"] if "key" in name]


def test_each_path_among_the_settings_is_shown_by_its_name_alone() -> None:
    """Also the settings that are still to come."""
    folder = Path("/home/ann/private")
    paths = {
        name: folder / name
        for name, field in Settings.model_fields.items()
        if "Path" in str(field.annotation) and not name.startswith("api_key")
    }
    assert "model" in paths
    shown = public_settings(Settings(**paths, api_key_file=folder / "key"))  # type: ignore[arg-type]
    assert {name: shown[name] for name in paths} == {name: name for name in paths}
    assert "ann" not in str(shown)
    assert set(Settings.model_fields) - set(shown) == {"api_key", "api_key_file"}


async def test_plan_is_null_where_nothing_was_planned(rig: ServerRig) -> None:
    assert (await rig.http.get("/props")).json()["plan"] is None


async def test_props_need_a_key_where_there_is_one(start_server: StartServer) -> None:
    rig = await start_server(api_key="k")
    for path in ("/props", "/v1/props"):
        assert (await rig.http.get(path)).status_code == 401


@pytest.mark.parametrize("state", [EngineState.RESTARTING, EngineState.DEAD, EngineState.BUSY])
async def test_props_are_answered_without_the_engine(start_server: StartServer, state: EngineState) -> None:
    rig = await start_server(FakeEngine(state=state))
    assert (await rig.http.get("/props")).status_code == 200
    assert rig.engine.queries == []


async def test_until_the_model_is_known_there_are_none(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(state=EngineState.LOADING, state_detail="42 %", model=None))
    reply = await rig.http.get("/props")
    assert "42 %" in assert_error(reply, 503, "unavailable_error", "loading")


async def test_props_cannot_be_changed(rig: ServerRig) -> None:
    reply = await rig.http.post("/props", json={})
    assert_error(reply, 405, "invalid_request_error", "method_not_allowed")
    assert "GET" in reply.headers["allow"]

"""Bugs that other servers for local models had, and where each one is tested here.

What no other test holds is tested below the table. References are reports of other projects:
ggml-org/llama.cpp (L), abetlen/llama-cpp-python (P), vllm-project/vllm (V), ikawrakow/ik_llama.cpp (I),
oobabooga/textgen (T), lmstudio-ai/lmstudio-bug-tracker (M).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Action, FakeEngine, Generate, finished, started, step
from scripted_answers import answer, answer_with_calls, call_id
from server_rig import ServerRig, StartServer, chat, chunks_of

from s2moe.engine.messages import Failed, Step

TESTS = Path(__file__).resolve().parents[1]
HERE = "server/test_server_known_bugs.py"
FILTERS = "engine/test_stream_filters.py"
STREAM = "server/test_server_chat_stream.py"
TOOLS = "server/test_server_openai_tools.py"
NATIVE_STREAM = "native/test_stream_property.py"

KNOWN_BUGS: tuple[tuple[str, str, str], ...] = (
    # text and UTF-8
    ("L#4036, P#372: characters lost when streamed", FILTERS, "test_characters_cut_anywhere_come_out_whole"),
    (
        "L PR 28724, unslothai/llama.cpp PR 202: a lone continuation byte is a 500",
        FILTERS,
        "test_invalid_bytes_never_fail_and_never_depend_on_cutting",
    ),
    (
        "L PR 28926: text cut within a character",
        "server/test_server_stream_properties.py",
        "test_stream_and_whole_answer_hold_what_the_engine_said",
    ),
    # stop strings
    (
        "mzau/mlx-knife#68: a stop is only seen inside one token",
        FILTERS,
        "test_stop_does_not_depend_on_cutting",
    ),
    (
        "smg-project/smg PR 2203: the end skips the parsers",
        FILTERS,
        "test_chain_gives_the_same_answer_for_any_cutting",
    ),
    (
        "V PR 45636: holding back cuts a tag in two",
        NATIVE_STREAM,
        "test_cuts_change_nothing_wherever_the_answer_ends",
    ),
    ("exllamav3: an empty stop holds everything back", FILTERS, "test_empty_stop_is_refused"),
    # disconnect and cancel
    (
        "L#11720, L#24496, I#1020: generation goes on when the client has left",
        "server/test_server_cancel.py",
        "test_client_that_leaves_is_aborted_in_time",
    ),
    (
        "I#1929: a queued client that leaves aborts another",
        "server/test_server_cancel.py",
        "test_queued_client_that_leaves_is_removed_and_the_running_one_is_undisturbed",
    ),
    # tool calls
    (
        "mistral.rs PR 1507, continue#13225, codex#7517: index or id missing",
        TOOLS,
        "test_parallel_calls_arrive_in_a_stream",
    ),
    (
        "vercel/ai PR 15879: the name comes after arguments",
        HERE,
        "test_call_opens_with_id_and_name_and_no_text",
    ),
    (
        "L#25510, OpenHands#13949, L#22948: broken arguments in the history are a 500 for ever",
        HERE,
        "test_broken_arguments_in_the_history_are_a_400_that_names_the_message",
    ),
    ("L#22072: cut arguments are repaired", TOOLS, "test_calls_cut_by_the_limit_are_not_repaired"),
    # history and templates
    ("V#13978: an empty list of calls breaks the template", HERE, "test_empty_list_of_calls_means_none"),
    (
        "mlx-openai-server PR 205: a message with null content is dropped",
        HERE,
        "test_message_with_null_content_keeps_its_calls",
    ),
    (
        "L#19703: reasoning, calls and content in one message",
        HERE,
        "test_message_with_reasoning_calls_and_content_reaches_the_engine",
    ),
    (
        "L#19703: the same, in the template",
        "native/test_chat_families.py",
        "test_reasoning_content_and_calls_of_one_message_are_rendered",
    ),
    ("tabbyAPI#117, ragflow#15358: content parts are a 422 or 500", HERE, "test_text_parts_are_joined"),
    (
        "smolvlm-realtime-webcam#13: an image to a text model is a 500",
        HERE,
        "test_image_is_a_400_that_names_the_part",
    ),
    # grammar and schema
    ("L#19051: a bad pattern is ignored", HERE, "test_schema_that_the_engine_refuses_is_a_400"),
    ("L#19051: the same, by its place", "native/test_chat_schemas.py", "test_schema_is_refused_by_its_place"),
    ("L#11544: a grammar is ignored", HERE, "test_grammar_reaches_the_engine"),
    (
        "L#12276, V#44012, V#47027, mlx-serve#331, maclocal-api#44: a schema binds the thinking, too",
        "native/test_chat_sampling.py",
        "test_reasoning_is_free_of_the_schema",
    ),
    (
        "V#11484: a grammar and speculation crash",
        "native/test_chat_sampling.py",
        "test_constrained_answers_are_the_same_with_speculation",
    ),
    # reasoning
    (
        "ollama#12628, V#27755: which name reasoning has",
        STREAM,
        "test_reasoning_has_both_names_and_never_shares_a_chunk_with_content",
    ),
    (
        "M#1602: all tokens spent on thinking is called stop",
        HERE,
        "test_thinking_up_to_the_limit_ends_with_length",
    ),
    # context
    (
        "L PR 16486, L PR 15780, I PR 2420: overflow of a stream is no HTTP error",
        "server/test_server_errors.py",
        "test_context_overflow_has_the_words_and_numbers_that_clients_read",
    ),
    # the usage chunk
    ("apfel#100, autogen#5331: it comes unasked", STREAM, "test_usage_is_absent_unless_asked_for"),
    (
        "ROCm/ATOM PR 1711: it has no choices",
        STREAM,
        "test_usage_chunk_comes_last_with_empty_choices_and_timings",
    ),
    # prompt cache
    (
        "L PR 20623, claude-code#50085: a line that changes begins the system prompt",
        HERE,
        "test_billing_line_of_the_system_prompt_does_not_reach_the_engine",
    ),
    (
        "0xku/kon#4: two conversations evict each other",
        "engine/test_prompt_cache.py",
        "test_two_conversations_alternate",
    ),
    # concurrency and queue
    (
        "T#5939: a request right after a cancelled one",
        "server/test_server_cancel.py",
        "test_next_request_waits_until_the_abort_is_through",
    ),
    (
        "ai-lab-recipes PR 494: a second request during prefill",
        "server/test_server_admission.py",
        "test_requests_run_one_at_a_time_in_the_order_of_arrival",
    ),
    (
        "coreai-models PR 250: places in the queue get lost",
        "server/test_server_cancel.py",
        "test_many_clients_that_leave_at_random_moments_leave_nothing_behind",
    ),
    (
        "prompt-declaration-language#702, pytorch/serve#2764: a full queue is a 503",
        "server/test_server_admission.py",
        "test_full_queue_is_429_with_retry_after",
    ),
    # engine death
    (
        "V PR 36451: a frozen engine is called healthy",
        "supervisor/test_supervisor_health.py",
        "test_an_engine_that_stops_ponging_is_killed_as_hung",
    ),
    (
        "V#48966: exit code 0 after the engine died",
        "e2e/test_e2e_faults.py",
        "test_an_engine_that_keeps_dying_ends_the_server_with_an_error",
    ),
    # silence
    (
        "pi#3715, L PR 24013: a silent stream is cut by the client",
        STREAM,
        "test_comments_are_sent_before_the_first_token",
    ),
    # speculation
    (
        "L#12968: the server accepts fewer drafts than it might",
        "native/test_speculation_exactness.py",
        "test_greedy_answers_of_the_demo_model",
    ),
    (
        "lmstudio-ai/lms#610: a draft that fails is a 500",
        "native/test_speculation_fallbacks.py",
        "test_drafts_end_when_their_own_context_is_full",
    ),
    (
        "lmstudio-ai/lms#610: the same, in the engine",
        "engine/test_decoder.py",
        "test_failure_inside_drafting_is_said_in_the_log",
    ),
    (
        "lmstudio-ai/lms#610: the same, at a grammar",
        "engine/test_decoder.py",
        "test_step_that_fails_at_a_grammar_is_one_plain_token",
    ),
    # memory
    (
        "L#27162: running out of memory is reported as something else",
        "supervisor/test_supervisor_restart.py",
        "test_memory_exhaustion_in_stderr_is_reported_as_oom",
    ),
    (
        "L#27872: a plan that does not fit is a warning, then the process is killed",
        "engine/test_plan.py",
        "test_refusal_has_the_arithmetic_and_the_remedies",
    ),
)
"""(report: what went wrong, file below tests, test). Left out are reports about what this server does not
have: sleeping, resumable streams, CUDA."""


@pytest.mark.parametrize(("bug", "file", "test"), KNOWN_BUGS, ids=lambda value: value.split(":")[0])
def test_each_bug_has_its_test(bug: str, file: str, test: str) -> None:
    """One that pytest collects, that is not skipped, and that checks something."""
    tree = ast.parse((TESTS / file).read_text())
    found = [
        each
        for each in tree.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == test
    ]
    assert len(found) == 1, f"{bug} is not tested any more"
    marks = " ".join(ast.unparse(each) for each in found[0].decorator_list)
    assert not re.search(r"\b(skip|skipif|xfail)\b", marks), f"the test of {bug} is not run"
    checks = [
        isinstance(each, ast.Assert)
        or (
            isinstance(each, ast.Call)
            and re.match(r"(pytest\.raises|(\w+\.)?(assert|check)_)", ast.unparse(each))
        )
        for statement in found[0].body
        for each in ast.walk(statement)
    ]
    assert any(checks), f"the test of {bug} checks nothing"


def user(text: str = "hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def call_of(arguments: str = '{"at":"it"}', name: str = "look") -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


LOOK = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "seen"}


def sent(rig: ServerRig) -> list[dict[str, Any]]:
    """The messages of the last request as the engine got them."""
    messages: list[dict[str, Any]] = json.loads(rig.engine.requests[-1].messages_json)
    return messages


async def test_call_opens_with_id_and_name_and_no_text(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer_with_calls(r, ("look", {"at": "it"}), before="So")))
    chunks = chunks_of((await rig.post(chat(stream=True, tools=LOOK))).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0] == {
        "index": 0,
        "id": call_id(0),
        "type": "function",
        "function": {"name": "look", "arguments": ""},
    }
    assert all(not call.get("id") and not call["function"].get("name") for call in calls[1:])
    assert not any(delta.get("content") for delta in deltas if delta.get("tool_calls"))
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"at": "it"}


@pytest.mark.parametrize("arguments", ["{", '{"at":', "not json", "[1]", '"text"'])
async def test_broken_arguments_in_the_history_are_a_400_that_names_the_message(
    rig: ServerRig, arguments: str
) -> None:
    history = [user(), {"role": "assistant", "content": None, "tool_calls": [call_of(arguments)]}, RESULT]
    reply = await rig.post({"messages": history, "tools": LOOK})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith("messages[1].tool_calls[0]")
    history[1]["tool_calls"] = [call_of()]
    assert (await rig.post({"messages": history, "tools": LOOK})).status_code == 200


@pytest.mark.parametrize("calls", [[], None])
async def test_empty_list_of_calls_means_none(rig: ServerRig, calls: list[Any] | None) -> None:
    history = [user(), {"role": "assistant", "content": "yes", "tool_calls": calls}, user()]
    assert (await rig.post({"messages": history})).status_code == 200
    assert not sent(rig)[1].get("tool_calls")


async def test_message_with_null_content_keeps_its_calls(rig: ServerRig) -> None:
    history = [user(), {"role": "assistant", "content": None, "tool_calls": [call_of()]}, RESULT]
    assert (await rig.post({"messages": history, "tools": LOOK})).status_code == 200
    assert [message["role"] for message in sent(rig)] == ["user", "assistant", "tool"]
    assert sent(rig)[1]["tool_calls"][0]["function"]["name"] == "look"


async def test_null_content_is_no_text_in_every_role(rig: ServerRig) -> None:
    said = {"role": "assistant", "content": None, "tool_calls": [call_of()]}
    history = [{"role": "system", "content": None}, user(), said, RESULT | {"content": None}]
    assert (await rig.post({"messages": [*history, user() | {"content": None}]})).status_code == 200
    assert [message["content"] for message in sent(rig)] == ["", "hi", None, "", ""]
    del history[3]["content"]
    assert (await rig.post({"messages": history})).status_code == 200
    assert sent(rig)[3]["content"] == ""


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_message_with_reasoning_calls_and_content_reaches_the_engine(rig: ServerRig, name: str) -> None:
    said = {"role": "assistant", "content": "Let me look.", name: "why not", "tool_calls": [call_of()]}
    assert (await rig.post({"messages": [user(), said, RESULT], "tools": LOOK})).status_code == 200
    message = sent(rig)[1]
    assert (message["content"], message["reasoning_content"]) == ("Let me look.", "why not")
    assert message["tool_calls"][0]["id"] == "call_1"


async def test_text_parts_are_joined(rig: ServerRig) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": role, "content": parts} for role in ("system", "user", "assistant", "user")]
    assert (await rig.post({"messages": messages})).status_code == 200
    assert {message["content"] for message in sent(rig)} == {"Hello"}


async def test_image_is_a_400_that_names_the_part(rig: ServerRig) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "what is it?"}, image]
    reply = await rig.post({"messages": [{"role": "user", "content": content}]})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "messages[0].content"
    assert "part 1" in error["message"]
    assert "image_url" in error["message"]
    assert "images are not supported" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_schema_that_the_engine_refuses_is_a_400(start_server: StartServer, stream: bool) -> None:
    def refuse(request: Generate) -> Sequence[Action]:
        assert json.loads(request.chat_options_json)["json_schema"]["pattern"] == "("
        message = "pattern: unbalanced parenthesis"
        param = "response_format"
        return [Failed(request_id=request.request_id, code="invalid_schema", message=message, param=param)]

    rig = await start_server(FakeEngine(refuse))
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "("}},
    }
    reply = await rig.post(chat(response_format=schema, stream=stream))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_schema", "response_format")
    assert "pattern" in error["message"]


async def test_grammar_reaches_the_engine(rig: ServerRig) -> None:
    grammar = 'root ::= "yes" | "no"'
    assert (await rig.post(chat(grammar=grammar))).status_code == 200
    assert rig.engine.requests[-1].sampling.grammar == grammar


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_up_to_the_limit_ends_with_length(start_server: StartServer, stream: bool) -> None:
    def think(request: Generate) -> Sequence[Action]:
        thought = step(request, reasoning="Hmm, ")
        return [started(request), thought, finished(request, "length", tokens=1, reasoning_tokens=1)]

    rig = await start_server(FakeEngine(think))
    reply = await rig.post(chat(max_tokens=1, stream=stream))
    choices = [each["choices"][0] for each in (chunks_of(reply.text) if stream else [reply.json()])]
    assert choices[-1]["finish_reason"] == "length"
    said = [choice.get("message") or choice["delta"] for choice in choices]
    assert "".join(each.get("reasoning_content") or "" for each in said) == "Hmm, "
    assert not any(each.get("content") for each in said)


async def test_billing_line_of_the_system_prompt_does_not_reach_the_engine(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer(r, "ok")))
    prompts = []
    for number in (1, 2):
        line = f"x-anthropic-billing-header: cc_version=2.{number}; cch={number};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}]
        body = {"model": "m", "max_tokens": 5, "system": system, "messages": [user()]}
        assert (await rig.http.post("/v1/messages", json=body)).status_code == 200
        prompts.append(sent(rig))
    assert prompts[0] == prompts[1]
    assert prompts[0][0] == {"role": "system", "content": "Be brief."}


async def test_step_that_released_nothing_is_no_chunk(start_server: StartServer) -> None:
    """microsoft/autogen#5331: clients trip over chunks without anything in them."""

    def quiet(request: Generate) -> Sequence[Action]:
        nothing = Step(request_id=request.request_id, n_tokens=3)
        return [started(request), nothing, step(request, "a"), nothing, finished(request)]

    rig = await start_server(FakeEngine(quiet))
    chunks = chunks_of((await rig.post(chat(stream=True))).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[1:] == [{"content": "a"}, {}]

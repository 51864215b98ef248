"""What a loaded engine answers, over its socket."""

from __future__ import annotations

import json
import string
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from engine_rig import Chat, EngineProcess

from s2moe.engine import messages as wire

FRANCE = ("user", "What is the capital of France?")
STORY = ("user", "Tell me a long story about a river and the people who live beside it.")
GREEDY = wire.Sampling(temperature=0)


def test_answers_in_the_order_of_the_contract(chat: Chat) -> None:
    chat.engine.send(chat.request(FRANCE))
    received = [m for m in chat.engine.receive_until(wire.Finished) if not isinstance(m, wire.EngineStats)]
    assert isinstance(received[0], wire.Started)
    kinds = [type(message).__name__ for message in received]
    assert kinds == sorted(kinds, key=["Started", "PrefillProgress", "Step", "Finished"].index)
    finished = received[-1]
    assert isinstance(finished, wire.Finished)
    steps = [m for m in received if isinstance(m, wire.Step)]
    assert sum(step.n_tokens for step in steps) == finished.n_completion_tokens
    assert "Paris" in "".join(step.content for step in steps)
    assert finished.reason == "stop"
    assert finished.n_prompt_tokens == received[0].n_prompt_tokens
    assert finished.timings.prefill_seconds > 0
    assert finished.timings.decode_seconds > 0


def test_greedy_text_equals_llama_cpp_pythons_own(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path, tmp_path: Path
) -> None:
    """The stock Llama class, in a process of its own, on our library.

    Both evaluate the whole prompt in one batch and with the same attention kernel (Llama's default is another
    one): otherwise they round differently.
    """
    engine = spawn()
    engine.load(tiny_model_path, n_ctx=2048, n_batch=256)
    ours, finished = Chat(engine).ask(STORY, max_tokens=64)
    script = tmp_path / "stock.py"
    script.write_text(
        "import json, sys\n"
        "from llama_cpp import Llama\n"
        "llama = Llama(sys.argv[1], n_ctx=2048, n_batch=256, n_threads=2, flash_attn=True, verbose=False)\n"
        "answer = llama.create_chat_completion(json.loads(sys.argv[2]), temperature=0, max_tokens=64)\n"
        "print(json.dumps(answer))\n"
    )
    messages = [
        {"role": "system", "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"},
        {"role": STORY[0], "content": STORY[1]},
    ]
    command = [sys.executable, str(script), str(tiny_model_path), json.dumps(messages)]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert answer["usage"]["prompt_tokens"] == finished.n_prompt_tokens
    assert answer["choices"][0]["message"]["content"] == ours


def test_second_turn_evaluates_only_what_is_new(chat: Chat) -> None:
    first, finished = chat.ask(STORY)
    assert finished.n_completion_tokens == 32
    second, again = chat.ask(STORY, ("assistant", first), ("user", "Go on."))
    # all of the first turn but what the template puts behind an answer
    assert again.n_cached_tokens >= finished.n_prompt_tokens + 30
    assert again.n_prompt_tokens - again.n_cached_tokens < 25
    assert second


def test_reused_prefix_does_not_change_the_answer(chat: Chat) -> None:
    fresh, _ = chat.ask(FRANCE, sampling=GREEDY)
    chat.ask(STORY)
    other, finished = chat.ask(FRANCE, sampling=GREEDY)
    assert finished.n_cached_tokens > 0, "both begin with the same system prompt"
    repeated, whole = chat.ask(FRANCE, sampling=GREEDY)
    assert whole.n_cached_tokens == whole.n_prompt_tokens - 1
    assert fresh == other == repeated


def test_max_tokens_ends_with_length(chat: Chat) -> None:
    for n in (1, 2, 7):
        text, finished = chat.ask(STORY, max_tokens=n)
        assert (finished.reason, finished.n_completion_tokens) == ("length", n)
        assert text


def test_stop_string_is_cut_off_and_named(chat: Chat) -> None:
    whole, _ = chat.ask(STORY, max_tokens=24)
    stop = whole[len(whole) // 2 - 3 : len(whole) // 2 + 3]
    text, finished = chat.ask(STORY, max_tokens=24, stop=["never to be seen", stop])
    assert text == whole[: whole.index(stop)]
    assert (finished.reason, finished.stop_string) == ("stop", stop)
    assert finished.n_completion_tokens < 24


def test_same_seed_same_text_and_temperature_matters(chat: Chat) -> None:
    def draw(seed: int) -> str:
        return chat.ask(STORY, sampling=wire.Sampling(temperature=1.5, top_p=1, min_p=0, seed=seed))[0]

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_penalties_and_bias_change_the_text(chat: Chat) -> None:
    plain, _ = chat.ask(STORY)
    for sampling in (
        wire.Sampling(temperature=0, presence_penalty=2.0),
        wire.Sampling(temperature=0, frequency_penalty=2.0),
        wire.Sampling(temperature=0, repeat_penalty=1.8),
    ):
        assert chat.ask(STORY, sampling=sampling, max_tokens=64)[0][: len(plain)] != plain
    biased = wire.Sampling(temperature=0, logit_bias={100: 100.0})
    assert len(set(chat.ask(STORY, sampling=biased, max_tokens=5)[0].split())) == 1


def test_grammar_constrains_the_answer(chat: Chat) -> None:
    sampling = wire.Sampling(temperature=0, grammar='root ::= "yes" | "no"')
    assert chat.ask(FRANCE, sampling=sampling)[0] in ("yes", "no")


BAD_GRAMMARS = {
    "unclosed": "root ::= (",
    "deep": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000,
    "no root": 'start ::= "a"',
    "less than none": 'root ::= "a"{5,2}',
    "ambiguous": "root ::= s0\n"
    + "\n".join(f"s{i} ::= s{i + 1} s{i + 1} | s{i + 1}" for i in range(40))
    + '\ns40 ::= "a"?',
    "nothing fits": "root ::= [z-a]",
    "no class": "root ::= [^]",
    "its own end": 'root ::= "a" <|im_end|>',
    "NUL": 'root ::= "a"\0 "b"',
    "left recursion behind what may be empty": 'root ::= b root "x" | "y"\nb ::= c\nc ::= "z"?',
    "nothing but itself": 'root ::= b root\nb ::= c\nc ::= ""',
    "nothing but itself, later": 'root ::= "a" b\nb ::= c b\nc ::= d\nd ::= ""',
    "long repetitions": 'root ::= "' + "a" * 30_000 + '"{2000}',
    "many repetitions": "root ::= " + '"a"{0,2000} ' * 5000,
}
LEVELS = "root ::= b b\n" + "\n".join(f"{one} ::= {two} {two}" for one, two in pairwise("bcdefg"))
AMBIGUOUS_GRAMMARS = {
    "levels": LEVELS + '\ng ::= ("a" | "a" | "aa" | "a"*)*',
    "levels of any text": LEVELS + "\ng ::= (. | [a-zA-Z] | . . | .*)*",
    "parts that may be left out": "root ::= (" + "[a-zA-Z ]? " * 1900 + ")*",
    "counted and left out": 'root ::= ("a"?){0,1000} "b"',
    "counted to the right": "root ::= "
    + " | ".join(f"[a-zA-Z ]{{{n}}} root" for n in range(1, 60))
    + ' | "."',
    "the same alternative": "root ::= (" + " | ".join(['"a"'] * 8000) + ")*",
}
"""Each has very many ways to read a text, and few stacks of rules to tell them apart."""
LONGEST_STEP = (
    f"root ::= ({' | '.join(['x'] * 500)}){{0,200}}\n"
    f"x ::= {' | '.join(json.dumps(string.ascii_lowercase[i % 26]) for i in range(200))}"
)
"""One token of it takes longer than any other grammar's."""
HOPELESS_GRAMMARS = {
    "each way many times": LONGEST_STEP,
    "counts in counts": 'root ::= (([a-z]{0,40}){0,40} "a"{0,40}){0,15}',
    "long class": "root ::= "
    + " | ".join(f'class "{n}" root' for n in range(100))
    + "\nclass ::= ["
    + "".join(chr(0x4E00 + n) for n in range(20_000))
    + "]",
    "without end to the right": "root ::= . | . root | . root root | . root root root | [a-z] root root",
}
"""Each can be read, and is then too much to be followed."""


@pytest.mark.parametrize("name", BAD_GRAMMARS)
def test_no_grammar_can_hang_or_end_the_engine(chat: Chat, name: str) -> None:
    started = time.monotonic()
    failed = chat.fail(FRANCE, sampling=wire.Sampling(grammar=BAD_GRAMMARS[name]))
    assert (failed.code, failed.param) == ("invalid_grammar", "grammar")
    assert time.monotonic() - started < 10
    assert "Paris" in chat.ask(FRANCE)[0]


@pytest.mark.parametrize("name", AMBIGUOUS_GRAMMARS)
def test_ambiguous_grammar_is_followed(chat: Chat, name: str) -> None:
    """Followed one stack after the other, most of these take practically for ever."""
    started = time.monotonic()
    sampling = wire.Sampling(temperature=0, grammar=AMBIGUOUS_GRAMMARS[name])
    text, finished = chat.ask(FRANCE, sampling=sampling, max_tokens=12)
    assert finished.n_completion_tokens > 1
    assert "any text" in name or set(text) <= set(string.ascii_letters + " .")
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("name", HOPELESS_GRAMMARS)
def test_hopeless_grammar_fails_soon_and_alone(chat: Chat, name: str) -> None:
    started = time.monotonic()
    sampling = wire.Sampling(temperature=0, grammar=HOPELESS_GRAMMARS[name])
    failed = chat.fail(FRANCE, sampling=sampling)
    assert (failed.code, failed.param) == ("invalid_grammar", "grammar")
    assert "too ambiguous" in failed.message
    assert "in one way only" in failed.message
    assert time.monotonic() - started < 30
    assert "Paris" in chat.ask(FRANCE)[0]


@pytest.mark.parametrize("delay_seconds", [0, 0.15])
def test_cancel_ends_the_work_on_a_grammar(chat: Chat, delay_seconds: float) -> None:
    """An engine that does not stop soon is taken for hung, and ended."""
    request = chat.request(FRANCE, sampling=wire.Sampling(temperature=0, grammar=LONGEST_STEP))
    chat.engine.send(request)
    started = chat.engine.receive_until(wire.Started)[-1]
    assert isinstance(started, wire.Started)
    n_done = started.n_cached_tokens
    while n_done < started.n_prompt_tokens:
        progress = chat.engine.receive_until(wire.PrefillProgress)[-1]
        assert isinstance(progress, wire.PrefillProgress)
        n_done = progress.n_done_tokens
    time.sleep(delay_seconds)
    aborted = time.monotonic()
    chat.engine.send(wire.Abort(request_id=request.request_id))
    finished = chat.engine.receive_until(wire.Finished, wire.Failed)[-1]
    assert isinstance(finished, wire.Finished), finished
    assert finished.reason == "cancelled"
    assert time.monotonic() - aborted < 2
    assert "Paris" in chat.ask(FRANCE)[0]


def test_grammars_of_clients_do_not_fill_the_log(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    engine = spawn()
    engine.load(tiny_model_path, n_ctx=2048)
    chat = Chat(engine)
    for grammar in ("root ::= (", 'start ::= "a"', 'root ::= root "x" | "y"'):
        failed = chat.fail(FRANCE, sampling=wire.Sampling(grammar=grammar))
        assert failed.code == "invalid_grammar"
    engine.send(wire.Shutdown())
    assert engine.process.stderr is not None
    log = engine.process.stderr.read().decode()
    assert "rammar" not in log
    assert "ERROR" not in log


def test_hopelessly_long_prompt_is_refused_without_tokenising_it(chat: Chat) -> None:
    """Tokenising this takes longer than a minute, and nothing could abort it."""
    started = time.monotonic()
    failed = chat.fail(("user", "<|im_end|>" * 700_000))
    assert failed.code == "context_length_exceeded"
    assert "at least" in failed.message
    assert time.monotonic() - started < 5


def test_one_libllama_is_loaded(chat: Chat) -> None:
    """Two copies would have two states, as when a library has two names and a wheel has no links."""
    maps = Path(f"/proc/{chat.engine.process.pid}/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in maps if "/libllama.so" in line}) == 1


@pytest.mark.parametrize(
    ("sampling", "is_greedy"),
    [
        (wire.Sampling(temperature=2.0, top_k=1), True),
        (wire.Sampling(temperature=2.0, top_p=0.0), True),
        (wire.Sampling(temperature=2.0, min_p=1.0), True),
        (wire.Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=1), False),
    ],
    ids=["top_k", "top_p", "min_p", "none"],
)
def test_each_cut_leaves_only_the_best_token(chat: Chat, sampling: wire.Sampling, is_greedy: bool) -> None:
    greedy, _ = chat.ask(STORY, max_tokens=16)
    assert (chat.ask(STORY, max_tokens=16, sampling=sampling)[0] == greedy) == is_greedy


def test_bad_requests_fail_alone(chat: Chat) -> None:
    grammar = chat.fail(FRANCE, sampling=wire.Sampling(grammar="root ::= ("))
    assert (grammar.code, grammar.param) == ("invalid_grammar", "grammar")
    assert "line 1, column 11" in grammar.message
    bias = chat.fail(FRANCE, sampling=wire.Sampling(logit_bias={10_000_000: 1.0}))
    assert (bias.code, bias.param) == ("invalid_value", "logit_bias")
    chat.engine.send(wire.Generate(request_id="x", messages_json=b"not json"))
    malformed = chat.engine.receive_until(wire.Failed)[-1]
    assert isinstance(malformed, wire.Failed)
    assert malformed.code == "invalid_value"
    assert "Paris" in chat.ask(FRANCE)[0]


def test_context_overflow_says_both_numbers(chat: Chat) -> None:
    failed = chat.fail(("user", "word " * 5000))
    assert failed.code == "context_length_exceeded"
    assert failed.n_ctx == 2048
    assert failed.n_prompt_tokens > 5000
    assert "maximum context length is 2048 tokens" in failed.message
    assert str(failed.n_prompt_tokens) in failed.message


def test_answer_stops_where_the_context_ends(chat: Chat) -> None:
    text, finished = chat.ask(
        ("user", "word " * 1900),
        max_tokens=None,
        sampling=wire.Sampling(temperature=0, logit_bias={2: -1000}),
    )
    assert text
    assert finished.reason == "length"
    assert finished.n_prompt_tokens + finished.n_completion_tokens == 2048


def test_stats_add_up(chat: Chat) -> None:
    chat.wait_idle()
    chat.engine.send(chat.request(STORY, max_tokens=150))
    received = chat.engine.receive_until(wire.Finished)
    finished = received[-1]
    assert isinstance(finished, wire.Finished)
    stats = [m for m in received if isinstance(m, wire.EngineStats)]
    assert sum(s.generated_tokens for s in stats) == finished.n_completion_tokens
    assert sum(s.prompt_tokens_cached for s in stats) == finished.n_cached_tokens
    computed = sum(s.prompt_tokens_computed for s in stats)
    assert computed == finished.n_prompt_tokens - finished.n_cached_tokens
    assert sum(s.decode_steps for s in stats) == finished.timings.n_decode_steps
    assert sum(s.graph_reuses for s in stats) > finished.timings.n_decode_steps * 0.9
    assert 0 < stats[-1].kv_cache_tokens <= stats[-1].kv_cache_capacity_tokens == 2048
    assert stats[-1].rss_bytes > 50e6

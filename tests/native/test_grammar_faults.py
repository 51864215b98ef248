"""What a client reads about a grammar that cannot be used: the place, or the rule, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s2moe.engine.native import Library, NativeError, Sampler, Status

from llama_model import LlamaModel

FAULTS = {
    "unclosed group": ('root ::= ("a"\n', "line 2, column 1, in the rule `root`: expecting ')'"),
    "second line": (
        'root ::= item\nitem ::= "a" )',
        "line 2, column 14, in the rule `item`: expecting newline or end",
    ),
    "no definition": (
        'root ::= "a"\nitem = "b"',
        "line 2, column 6, in the rule `item`: expecting ::=",
    ),
    "no name": ('root ::= "a"\n"b"', "line 2, column 1: expecting name"),
    "unknown escape": (r'root ::= "a\q"', "line 1, column 12, in the rule `root`: unknown escape"),
    "half an escape": (r"root ::= [\x4]", "line 1, column 13, in the rule `root`: expecting 2 hex chars"),
    "columns count characters": ('root ::= "äöü" )', "line 1, column 16, in the rule `root`: expecting"),
    "unclosed literal": (
        'root ::= item\nitem ::= "abc',
        "line 2, in the rule `item`: unexpected end of input",
    ),
    "nothing to repeat": (
        'root ::= ("a" | *\n\n)',
        "line 1, column 17, in the rule `root`: expecting preceding item",
    ),
    "maximum below minimum": ('root ::= "a"{5,2}', "line 1, in the rule `root`: a repetition whose maximum"),
    "too many repetitions": ('\nroot ::= "a"{3000}', "line 2, in the rule `root`: number of repetitions"),
    "long repetitions": (
        'root ::= "' + 30_000 * "a" + '"{2000}',
        "line 1, in the rule `root`: the repetitions of the grammar add up to too much",
    ),
    "many repetitions": (
        "root ::= " + 5_000 * '"a"{0,2000}',
        "line 1, in the rule `root`: the repetitions of the grammar add up to too much",
    ),
    "number without end": (
        f'root ::= "a"{{{"9" * 30}}}',
        "line 1, in the rule `root`: a number is too large",
    ),
    "a range the wrong way round": (
        'root ::= item\nitem ::= "ä" [a-cz-x]+',
        "line 2, column 18, in the rule `item`: a range that ends before it begins",
    ),
    "a negated range the wrong way round": (
        "root ::= [^ω-β]",
        "line 1, column 12, in the rule `root`: a range that ends",
    ),
    "an empty class": (
        'root ::= "[^]" # [\nb ::= []',
        "line 2, column 7, in the rule `b`: a class that holds no character",
    ),
    "an empty negated class": (
        "root ::= [^]",
        "line 1, column 10, in the rule `root`: a class that holds no",
    ),
    "a class of nothing that a text holds": (
        r"root ::= [\x00\uD800-\uDFFF\U00110000-\UFFFFFFFF]",
        "line 1, column 10, in the rule `root`: a class that holds no character",
    ),
    "a character beyond Unicode": (
        r'root ::= "a\U7FFFFFFF"',
        "line 1, column 12, in the rule `root`: no text holds the character U+7FFFFFFF",
    ),
    "an escaped NUL": (
        r'root ::= "\"a\x00b"',
        "line 1, column 14, in the rule `root`: no text holds the character U+0000",
    ),
    "half of a UTF-16 pair": (
        r'root ::= "\uD83D\uDE00"',
        "line 1, column 11, in the rule `root`: no text holds",
    ),
    "a token that ends the answer": (
        'root ::= "a"\r# "\r\nb ::= "b" <[2]>',
        "line 2, column 11, in the rule `b`: a token that ends an answer",
    ),
    "a token beyond the vocabulary": (
        "root ::= <[4000000000]>",
        "line 1, column 10, in the rule `root`: the vocabulary has no token 4000000000",
    ),
    "no such token": ("root ::= <no-such-token>", "in the rule `root`: what stands in <> must be one token"),
    "undefined": ('root ::= "item" item\n', "line 1, column 17: the rule `item` is not defined"),
    "undefined in a group": (
        'root ::= other\nother ::= "a" (item)?',
        "line 2, column 16: the rule `item` is not defined",
    ),
    "undefined and optional": ('root ::= item? "a"', "line 1, column 10: the rule `item` is not defined"),
    "a long name": ("root ::= " + 100 * "x", f"the rule `{64 * 'x'}...` is not defined"),
    "no root": ('start ::= "a"', "there is no rule `root`"),
    "nothing": ("# only a comment", "there is no rule `root`"),
    "left recursion": (
        'root ::= expr\nexpr ::= expr "+" [0-9] | [0-9]',
        "line 2: the rule `expr` begins with itself (left recursion)",
    ),
    "left recursion over another rule": (
        'root ::= "r" | a\na ::= b "x"\nb ::= a | "y"',
        "line 2: the rule `a` begins with itself by way of `b` (left recursion)",
    ),
    "left recursion in a group": (
        'root ::= (root "x")? "y"',
        "line 1: the rule `root` begins with itself (left recursion)",
    ),
    "left recursion behind what may be empty": (
        'root ::= space root "x" | "y"\nspace ::= "" | " "',
        "line 1: the rule `root` begins with itself (left recursion)",
    ),
    "nothing but itself": ('root ::= b root\nb ::= c\nc ::= ""', "the grammar allows no text"),
    "NUL": ('root ::= "a"\nb ::= "\0"', "line 2, column 8: the grammar contains a NUL character"),
    "deep groups": (
        "root ::=\n " + 201 * "(" + '"a"' + 201 * ")",
        "line 2, column 202: the grammar nests more than 200 groups",
    ),
    "endless before the first character": ('root ::= b root "x" | "y"\nb ::= c\nc ::= "z"?', "too ambiguous"),
}


@pytest.fixture(scope="module")
def model(random_model: Callable[[str], Path]) -> Iterator[LlamaModel]:
    with LlamaModel(random_model("qwen3moe"), n_ctx=64) as model:
        yield model


@pytest.mark.parametrize("name", FAULTS)
def test_the_message_names_the_place(library: Library, model: LlamaModel, name: str) -> None:
    grammar, expected = FAULTS[name]
    with pytest.raises(NativeError) as caught:
        Sampler(library, model._model, {"grammar": grammar})
    assert caught.value.status == Status.GRAMMAR
    assert expected in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "grammar",
    [
        r"root ::= [^\x00-\x1F] [\x00-\U7FFFFFFF]",
        r'root ::= "[z-a]" [\]\-a-] # [z-a] "\x00"' + "\n",
        r'root ::= "\uD7FF\uE000\U0010FFFF" [\uD800-\uE000]',
        "root ::= [^a] [-] [a-] [^-] [β-ω]",
        'root ::= "a" !<[2]> <[5]>',
    ],
)
def test_what_answers_can_hold_is_taken(library: Library, model: LlamaModel, grammar: str) -> None:
    Sampler(library, model._model, {"grammar": grammar}).close()

"""What a request begins with: a rendered conversation, or a raw prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from s2moe.engine.chat_options import ChatOptions
from s2moe.engine.constraint import Constraint, check_combination, schema_param
from s2moe.engine.errors import RequestError
from s2moe.engine.messages import Generate
from s2moe.engine.native import NativeError, Status
from s2moe.engine.vocabulary import Vocabulary

if TYPE_CHECKING:
    from s2moe.engine.model import Model

CONTENT_ONLY: Final = "content-only"
_PLACE: Final = re.compile(r"(?:messages|tools)(?:\[\d+\]|\.\w+)*")
"""In a request; libs2moe's messages about it begin with that."""


@dataclass(frozen=True)
class Room:
    """How long a text may be, and how to say that it is too long."""

    n_ctx: int
    param: str
    what: str
    """The text, with its verb: `the messages have`."""
    n_reserved: int = 0
    """Tokens that must stay free, for an answer."""

    def check(self, n_tokens: int, *, at_least: bool = False) -> None:
        """Raises RequestError with both numbers."""
        if n_tokens + self.n_reserved <= self.n_ctx:
            return
        count = f"at least {n_tokens}" if at_least else str(n_tokens)
        why = ", which leaves no room for an answer" if self.n_reserved else ""
        raise RequestError(
            "context_length_exceeded",
            f"This model's maximum context length is {self.n_ctx} tokens, but {self.what} {count} "
            f"tokens{why}. Shorten the input or serve with a larger --ctx-size.",
            param=self.param,
            n_prompt_tokens=n_tokens,
            n_ctx=self.n_ctx,
        )

    def check_bytes(self, vocabulary: Vocabulary, n_bytes: int) -> None:
        """Before a text is tokenised, which takes long if it is long."""
        self.check(vocabulary.min_token_count(n_bytes), at_least=True)


@dataclass(frozen=True)
class Prompt:
    """Text or tokens, and how the answer to them is read."""

    room: Room
    text: str = ""
    tokens: Sequence[int] | None = None
    """Instead of text."""
    chat_json: bytes | None = None
    """For the parser of the answer; None: the answer is nothing but content."""
    stops: Sequence[str] = ()
    """Texts that end the model's turn."""
    preserved_tokens: Sequence[str] = ()
    """Markers that the parser needs to see: names of control tokens, and longer texts that may hold such."""
    constraint: Constraint | None = None
    thinking: Mapping[str, Any] | None = None
    """How the template marks reasoning, for the sampler of a request with a grammar of its own."""

    def tokenize(self, vocabulary: Vocabulary) -> list[int]:
        """Raises RequestError when there are none, too many, or some that are not in the vocabulary."""
        if self.tokens is None:
            self.room.check_bytes(vocabulary, len(self.text.encode(errors="replace")))
            tokens = vocabulary.tokenize_prompt(self.text)
        else:
            self.room.check(len(self.tokens))
            tokens = list(self.tokens)
            check_tokens(vocabulary, tokens, self.room.param)
        if not tokens:
            raise RequestError("invalid_value", "the prompt has no tokens", param=self.room.param)
        self.room.check(len(tokens))
        return tokens


def check_tokens(vocabulary: Vocabulary, tokens: Sequence[int], param: str) -> None:
    """Raises RequestError when some are not in the vocabulary."""
    for token in tokens:
        if token not in vocabulary:
            raise RequestError(
                "invalid_value",
                f"token {token} is not in the vocabulary, whose tokens are 0 to {vocabulary.n_tokens - 1}",
                param=param,
            )


def read_prompt(model: Model, request: Generate) -> Prompt:
    """Raises RequestError when there is not exactly one prompt, or it cannot be rendered."""
    is_raw = request.prompt is not None or request.prompt_tokens is not None
    if is_raw and (request.messages_json or None not in (request.prompt, request.prompt_tokens)):
        raise RequestError(
            "invalid_value", "there is more than one of messages, prompt and prompt tokens", param="prompt"
        )
    if is_raw:
        room = Room(model.n_ctx, "prompt", "the prompt has", n_reserved=1)
        prompt = Prompt(room, request.prompt or "", request.prompt_tokens)
    else:
        options = ChatOptions.read(request.chat_options_json)
        check_combination(request.sampling, options)
        room = Room(model.n_ctx, "messages", "the messages have", n_reserved=1)
        prompt = render(model, request.messages_json, options, room)
    own = Constraint.of_request(request.sampling, prompt.thinking)
    return prompt if own is None else replace(prompt, constraint=own)


def render(model: Model, messages_json: bytes, options: ChatOptions, room: Room) -> Prompt:
    """Runs the chat template. Raises RequestError when messages, tools or schema are refused, or the
    messages cannot fit."""
    room.check_bytes(model.vocabulary, _content_bytes(messages_json))
    try:
        chat_json = model.chat_template.apply(options.to_request(messages_json))
    except NativeError as error:
        raise _refused(error, options) from error
    chat: dict[str, Any] = json.loads(chat_json)
    if options.is_strict:
        _check_enforced(chat.get("unenforced", ()))
    return Prompt(
        room,
        chat["prompt"],
        chat_json=None if chat["format"] == CONTENT_ONLY else chat_json,
        stops=chat["stops"],
        preserved_tokens=chat["preserved_tokens"],
        constraint=Constraint.of_chat(chat, options),
        thinking=chat.get("thinking"),
    )


def _content_bytes(messages_json: bytes) -> int:
    """Of the text that templates put into the prompt as it is."""
    try:
        contents = [message.get("content") for message in json.loads(messages_json)]
        return sum(len(content.encode()) for content in contents if content is not None)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(
            "invalid_value", "messages are not a list of chat messages with text", param="messages"
        ) from error


def _check_enforced(unenforced: Sequence[str]) -> None:
    """`unenforced`: what s2moe_chat_apply() says of schemas. Raises RequestError for part of a strict one;
    the format of a string is an annotation unless it is said to be more."""
    for lost in unenforced:
        if lost.startswith("json_schema at ") and not lost.endswith(": format"):
            raise RequestError(
                "invalid_schema",
                f"{lost} cannot be enforced, but the schema is strict; leave it out, or ask without strict",
                param="response_format",
            )


def _refused(error: NativeError, options: ChatOptions) -> RequestError:
    place = _PLACE.match(error.message)
    match error.status:
        case Status.GRAMMAR:
            param = place[0] if place else schema_param(options)
            return RequestError("invalid_schema", error.message, param=param)
        case Status.TEMPLATE:
            reason = f"the chat template refuses the messages: {error.message}"
            return RequestError("template_error", reason, param="messages")
        case Status.NO_MEMORY:
            return RequestError("insufficient_memory", error.message)
        case Status.UNSUPPORTED:
            return RequestError("invalid_value", error.message, param=schema_param(options))
        case _:
            return RequestError("invalid_value", error.message, param=place[0] if place else "messages")

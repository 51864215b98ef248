"""The server's settings: one model, four layers (command line > environment > TOML file > defaults).

Every setting is declared once, here; the command line and its help text are generated from the fields.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from s2moe.server.speculation_names import MAX_EXPERTS, MAX_NODES, MAX_REUSE_STRENGTH, Method, Preset

ENV_PREFIX = "S2MOE_"
CONFIG_ENV = f"{ENV_PREFIX}CONFIG"
OTHER_VARIABLES = (
    CONFIG_ENV,
    # read by the engine
    "S2MOE_CACHE_DIR",
    "S2MOE_LIB_DIR",
    # of deploy/rtx4090/compose.yml
    "S2MOE_IMAGE",
    "S2MOE_MEMORY_LIMIT",
    # of the tests
    "S2MOE_FAULTS",
    "S2MOE_FUZZ_CASES",
    "S2MOE_FUZZ_FIRST",
    "S2MOE_RPC_CHECK",
    "S2MOE_TEST_MODEL",
)
"""Environment variables of this project that are no settings."""
DEMO_ALIAS = "demo"
AUTO_BUDGET = 0
AUTO_PROMPT_CACHE = -1
MAX_SIZE_BYTES = 2**50
"""More than any machine has, and less than the wire's integers hold."""

_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[kmgt]?i?b?)", re.IGNORECASE)
_UNIT_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNIT_BYTES = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class SettingsError(Exception):
    """A setting is missing, unknown or wrong; the message is one line that names it and the remedy."""


def parse_size_bytes(value: object) -> object:
    """Turns `8MiB`, `1500 MiB`, `12GiB`, `64kB` or a plain number into bytes.

    Other types are passed on for pydantic to judge. Raises ValueError for text that is not a size.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError("not a size; write bytes or a number with a unit, such as 8MiB or 12GiB")
    unit = match["unit"].lower().removesuffix("b")
    scale = _BINARY_UNIT_BYTES[unit[0]] if unit.endswith("i") and unit != "i" else _UNIT_BYTES.get(unit)
    if scale is None:
        raise ValueError("not a size; write bytes or a number with a unit, such as 8MiB or 12GiB")
    n_bytes = int(Decimal(match["number"]) * scale)
    if n_bytes > MAX_SIZE_BYTES:
        raise ValueError(f"too large; the most is {MAX_SIZE_BYTES // 2**40}TiB")
    return n_bytes


def parse_budget_bytes(value: object) -> object:
    """As parse_size_bytes(); `auto` becomes AUTO_BUDGET. Raises ValueError."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return AUTO_BUDGET
    n_bytes = parse_size_bytes(value)
    if n_bytes == 0:
        raise ValueError("no memory is not enough; write a size such as 1500MiB, or auto")
    return n_bytes


def parse_cache_bytes(value: object) -> object:
    """As parse_size_bytes(); `auto` becomes AUTO_PROMPT_CACHE. Raises ValueError."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return AUTO_PROMPT_CACHE
    if value == AUTO_PROMPT_CACHE:
        raise ValueError("not a size; write bytes or a number with a unit, such as 256MiB, or auto")
    return parse_size_bytes(value)


SizeBytes = Annotated[int, BeforeValidator(parse_size_bytes)]
BudgetBytes = Annotated[int, BeforeValidator(parse_budget_bytes)]
CacheBytes = Annotated[int, BeforeValidator(parse_cache_bytes)]


class Settings(BaseSettings):
    """What `s2moe serve` can be told. Built by `load_settings`, which turns errors into one line."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        validate_default=False,
        protected_namespaces=(),
        # The input of a failed validation may be the API key.
        hide_input_in_errors=True,
    )

    model: Path | None = Field(None, description="GGUF file to serve; without it the demo model is built")
    alias: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="name of the model in answers and metrics (default: the file's stem, or demo)",
    )
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="TCP port to listen on; 0 picks a free one")
    ctx_size: int = Field(
        0,
        ge=0,
        le=10_000_000,
        description="context length in tokens, rounded up to a multiple of 256; 0 = the model's own, at most "
        "8192",
    )
    threads: int = Field(0, ge=0, le=1024, description="compute threads; 0 = one per physical core")
    batch_size: int = Field(
        0,
        ge=0,
        le=65536,
        description="prompt tokens evaluated per native call; 0 = 512, or fewer where memory is short",
    )
    memory_budget: BudgetBytes = Field(
        AUTO_BUDGET,
        ge=0,
        le=MAX_SIZE_BYTES,
        description="memory for everything, in bytes or as 1500MiB; experts that do not fit are read from "
        "the model file; auto = what the machine or container has, less a reserve",
    )
    vram_budget: BudgetBytes = Field(
        AUTO_BUDGET,
        ge=0,
        le=MAX_SIZE_BYTES,
        description="with --device cuda: memory of the GPU for the model, its KV cache and slots for "
        "experts, in bytes or as 12GiB; experts without a slot come from the machine's memory, or from the "
        "model file; auto = what is free, less a reserve, without slots where all experts fit",
    )
    prompt_cache_size: CacheBytes = Field(
        AUTO_PROMPT_CACHE,
        ge=AUTO_PROMPT_CACHE,
        le=MAX_SIZE_BYTES,
        description="memory, out of the budget, in which other conversations wait to be taken up again "
        "without reading their prompts anew, in bytes or as 256MiB; 0 = none; auto = a tenth of what the "
        "experts can spare, at most 1GiB",
    )
    prompt_cache_dir: Path | None = Field(
        None,
        description="directory in which these conversations are kept between runs, in as many bytes again; "
        "it holds what was said (default: they are not kept)",
    )
    io: Literal["auto", "direct", "buffered"] = Field(
        "auto",
        description="how experts are read: past the page cache (O_DIRECT), or through it; auto = direct "
        "where the file system allows it",
    )
    reader: Literal["auto", "io_uring", "threads"] = Field(
        "auto", description="what reads experts; auto = io_uring where the system allows it, else threads"
    )
    hot_experts: Path | None = Field(
        None,
        description="file of `s2moe profile` that says which experts to read ahead of the first request "
        "(default: those that earlier runs used most)",
    )
    expert_policy: Literal["cache", "static"] = Field(
        "cache",
        description="which experts stay in memory; cache = those in use; static = the most used of "
        "--hot-experts and never another, for comparison",
    )
    keep_expert_counts: bool = Field(
        True,
        description="keep in the cache directory how often experts are used, and what speculation learnt of "
        "costs, for the next run",
    )
    expert_trace: Path | None = Field(
        None, description="file to write what each decode read, one line of JSON each, for benchmarks"
    )
    speculation: Method = Field(
        "s2moe",
        description="how the model drafts for itself; off = one token per step; expert-skip and cascade are "
        "for comparison",
    )
    preset: Preset | None = Field(
        None,
        description="how far the choice of experts may be bent towards those in use and in memory; exact = "
        "not at all (default: balanced, and exact for expert-skip and cascade)",
    )
    exact: bool = Field(
        False,
        description="the text is that of requests with speculation off: the preset exact, "
        "whatever else is set",
    )
    draft_experts: int = Field(
        0, ge=0, le=MAX_EXPERTS, description="experts per token of a draft; 0 = a quarter of the model's"
    )
    max_nodes: int | None = Field(
        None,
        ge=1,
        le=MAX_NODES,
        description="drafts verified at once, at most (default: 7, and 14 for expert-skip)",
    )
    reuse_strength: float | None = Field(
        None,
        ge=0,
        le=MAX_REUSE_STRENGTH,
        allow_inf_nan=False,
        description="pull of experts in use on doubtful drafts; 0 = none (default: the preset's)",
    )
    reuse_cap: int | None = Field(
        None,
        ge=0,
        le=MAX_EXPERTS,
        description="experts of a layer that count as in use; 0 = twice those of one token (default: the "
        "preset's)",
    )
    error_budget: float | None = Field(
        None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="share of the mixing weights, 0 to 1, that may go to experts that the router would not "
        "have chosen (default: the preset's)",
    )
    single_token_bias: bool | None = Field(
        None,
        description="bend the choice also for the last token and where a token is evaluated alone (default: "
        "the preset's)",
    )
    adaptive: bool = Field(
        True, description="let costs decide how many drafts are verified; off = a fixed tree, for comparison"
    )
    reuse_gating: bool = Field(
        True, description="bend the choice of experts as the preset says; off = never, for comparison"
    )
    shared_context: bool = Field(
        True, description="draft on the model's own KV cache; off = on a second one, for comparison"
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu",
        description="where the model runs; cuda = on the GPU, with slots for experts where not all of them "
        "fit, or not at all: the server never takes the CPU instead",
    )
    chat_template_file: Path | None = Field(
        None, description="Jinja file that replaces the model's own chat template"
    )
    queue_size: int = Field(
        16, ge=0, le=10_000, description="requests that may wait behind the running one; more get 429"
    )
    queue_timeout: float = Field(
        0.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="seconds that a request may wait for the engine before it gets 429; 0 = any time",
    )
    request_timeout: float = Field(
        0.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="seconds that an answer may take once it was begun, all its choices together; longer "
        "ones are cut with an error, 504 where nothing was sent yet; 0 = any time",
    )
    strict_model: bool = Field(
        False, description="answer 404 to a request that names another model, instead of serving it"
    )
    reasoning_fields: Literal["both", "reasoning_content", "reasoning"] = Field(
        "both",
        description="under which names chat completions give the reasoning; both = the same text twice, for "
        "clients of either kind",
    )
    max_body_size: SizeBytes = Field(
        8 * 2**20,
        ge=1024,
        le=MAX_SIZE_BYTES,
        description="largest request body, in bytes or as 8MiB, less where the context is smaller; more gets "
        "413",
    )
    page: bool = Field(True, description="serve the chat page at /")
    api_key: SecretStr | None = Field(
        None,
        description="key that clients must send; on the command line every local user can read it, "
        "so prefer the environment or --api-key-file",
    )
    api_key_file: Path | None = Field(None, description="file whose first line is the API key")
    cors_origin: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="browser origin that may call the API, such as http://localhost:3000, or *; "
        "repeat the flag, or separate by commas in the environment",
    )
    ping_interval: float = Field(
        10.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="seconds of silence in a stream between keep-alive comments; 0 = none",
    )
    shutdown_timeout: float = Field(
        10.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="seconds that running requests may go on after SIGTERM",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")
    log_format: Literal["text", "json"] = Field("text", description="one line of text or of JSON per event")
    log_prompts: bool = Field(False, description="write the text of requests to the log")

    @field_validator("cors_origin", mode="before")
    @classmethod
    def _split_origins(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("cors_origin")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ValueError(
                    f"{origin!r} is not an origin; write http(s)://host[:port] without a path, or *"
                )
        return value

    @field_validator("api_key")
    @classmethod
    def _check_key(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            _check_key_text(value.get_secret_value())
        return value

    @property
    def model_alias(self) -> str:
        """The name under which the model is served."""
        if self.alias is not None:
            return self.alias
        return DEMO_ALIAS if self.model is None else self.model.stem

    def read_api_key(self) -> bytes | None:
        """The key that clients must send, from api_key or api_key_file; None = no key is asked for.

        Raises SettingsError when both are given or the file cannot be used.
        """
        if self.api_key_file is None:
            return None if self.api_key is None else self.api_key.get_secret_value().encode()
        if self.api_key is not None:
            raise SettingsError("--api-key and --api-key-file are both set; give one of them")
        lines = read_text_setting("--api-key-file", self.api_key_file).splitlines()
        key = lines[0].strip() if lines else ""
        try:
            _check_key_text(key)
        except ValueError as error:
            raise SettingsError(f"--api-key-file: {self.api_key_file}: {error}") from error
        return key.encode()

    def read_chat_template(self) -> str | None:
        """The Jinja source of chat_template_file. Raises SettingsError when it cannot be read."""
        if self.chat_template_file is None:
            return None
        return read_text_setting("--chat-template-file", self.chat_template_file)


def read_text_setting(flag: str, path: Path) -> str:
    """Reads a UTF-8 file that a setting names. Raises SettingsError naming the flag."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"{flag}: cannot read {path}: {error.strerror or error}; check the path and its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{flag}: {path} is not UTF-8 text; save it as such, or name another") from error


def flag_of(field: str) -> str:
    """`ctx_size` → `--ctx-size`."""
    return "--" + field.replace("_", "-")


def env_of(field: str) -> str:
    """`ctx_size` → `S2MOE_CTX_SIZE`."""
    return ENV_PREFIX + field.upper()


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A line for each variable that looks like a setting and is none, since nothing else would tell."""
    known = [*map(env_of, Settings.model_fields), *OTHER_VARIABLES]
    return [
        f"{name} is set, but there is no such setting; {_suggest(name.upper(), known, ENV_PREFIX)}"
        for name, value in environment.items()
        if value and name.upper().startswith(ENV_PREFIX) and name.upper() not in known
    ]


def load_settings(cli: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Merges the layers. `cli` holds only the flags that were given, as text or as parsed values.

    `config` is the TOML file; None = the one named by S2MOE_CONFIG, if any. Raises SettingsError.
    """
    if config is None and os.environ.get(CONFIG_ENV):
        config = Path(os.environ[CONFIG_ENV])
    table = {} if config is None else _read_toml(config)

    class Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, table)

    try:
        return Layered(**cli)
    except ValidationError as error:
        raise SettingsError(_describe(error, cli, config)) from error


def _read_toml(path: Path) -> dict[str, Any]:
    text = read_text_setting("--config", path)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"--config: {path} is not valid TOML: {error}") from error
    for key in table:
        if key not in Settings.model_fields:
            suggestion = _suggest(key.replace("-", "_"), Settings.model_fields)
            raise SettingsError(f"--config: {path} has the unknown key `{key}`; {suggestion}")
    return table


def _suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    return did_you_mean(name, known, prefix) or "`s2moe serve --help` lists the settings"


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Empty: nothing is like it. What all have in common, the `prefix`, is no likeness."""
    import difflib

    close = difflib.get_close_matches(
        name.removeprefix(prefix), [each.removeprefix(prefix) for each in known], n=1
    )
    return f"did you mean `{prefix}{close[0]}`?" if close else ""


def _describe(error: ValidationError, cli: Mapping[str, Any], config: Path | None) -> str:
    first = error.errors()[0]
    field = str(first["loc"][0])
    if field in cli:
        source = flag_of(field)
    elif os.environ.get(env_of(field)):
        source = env_of(field)
    else:
        source = f"`{field}` in {config}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{source}: {message[0].lower()}{message[1:]}"


def _check_key_text(key: str) -> None:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("an API key is a non-empty word of printable ASCII characters")

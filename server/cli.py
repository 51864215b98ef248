"""The command `s2moe`: serve, inspect, profile, quality, pull, demo-model, version.

Exit codes: 0 done or stopped by a signal, 1 failure (also an engine that keeps crashing, so that systemd
or Docker restarts), 2 wrong usage or settings, which no restart mends (of those that only the engine can
judge: engine/messages.py, WRONG_SETTING_CODES); `pull` has more, in server/pull/errors.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from s2moe.server import quality_command
from s2moe.server.argument_types import budget, cache_size, not_negative, positive
from s2moe.server.pull import command as pull_command
from s2moe.server.pull.errors import PullError
from s2moe.server.settings import (
    AUTO_BUDGET,
    AUTO_PROMPT_CACHE,
    CONFIG_ENV,
    Settings,
    SettingsError,
    did_you_mean,
    env_of,
    flag_of,
    load_settings,
    unknown_variables,
)

EXIT_USAGE = 2
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130

_log = logging.getLogger(__name__)

PROFILE_TOKENS = 128

DEMO_EXPERTS = 16
DEMO_USED = 4
DEMO_SIGMA = 0.1
DEMO_SEED = 0


class _Parser(argparse.ArgumentParser):
    """An error is one line, without the usage text in front of it, and names the command's own help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """argparse would leave unknown arguments of a command to the whole program's parser."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            flags = (each for each in self._option_string_actions if each.startswith("--"))
            suggestion = did_you_mean(flag, flags, "--")
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (suggestion and f"; {suggestion}"))
        return known, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"s2moe: error: {message} (see `{self.prog} --help`)\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command and exits the process."""
    arguments = vars(build_parser().parse_args(argv))
    command = arguments.pop("command")
    try:
        sys.exit(_COMMANDS[command](arguments))
    except SettingsError as error:
        _exit(EXIT_USAGE, str(error))
    except KeyboardInterrupt:
        _exit(EXIT_INTERRUPTED, "interrupted")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="s2moe",
        description="OpenAI-compatible inference server for Mixture-of-Experts models.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=_version_text(), help="print the version, as the command does"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_inspect(commands)
    _add_profile(commands)
    quality_command.add_parser(commands)
    pull_command.add_parser(commands)
    _add_demo_model(commands)
    commands.add_parser("version", help="print the version")
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.dedent(
            f"""\
            Serve a model through the OpenAI API.

            Each setting comes from the first of: command line, environment variable, TOML file
            (--config or {CONFIG_ENV}; keys are the names with underscores), default.
            """
        ),
    )
    serve.add_argument(
        "--config", type=Path, metavar="PATH", help=f"TOML file with settings [env {CONFIG_ENV}]"
    )
    for name, field in Settings.model_fields.items():
        _add_setting(serve, name, field)


def _add_setting(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    # Values stay text: the settings model judges those of all sources alike.
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "metavar": _metavar(name, field)}
    if field.annotation is bool:
        options |= {"action": argparse.BooleanOptionalAction}
        del options["metavar"]
    elif name == "cors_origin":
        options |= {"action": "append"}
    text = f"{field.description} [env {env_of(name)}{_default_text(name, field)}]"
    parser.add_argument(flag_of(name), help=text.replace("%", "%%"), **options)


def _metavar(name: str, field: FieldInfo) -> str:
    choices = getattr(field.annotation, "__args__", ())
    words = tuple(each for choice in choices for each in getattr(choice, "__args__", (choice,)))
    if words and all(isinstance(each, str) for each in words if each is not type(None)):
        return "|".join(each for each in words if each is not type(None))
    if name in ("max_body_size", "memory_budget", "prompt_cache_size", "vram_budget"):
        return "SIZE"
    if bool in choices:
        return "true|false"
    if Path in (field.annotation, *choices):
        return "PATH"
    if int in (field.annotation, *choices):
        return "N"
    if field.annotation is float:
        return "SECONDS"
    if float in choices:
        return "X"
    return {"host": "ADDRESS", "cors_origin": "ORIGIN", "api_key": "KEY"}.get(name, "NAME")


def _default_text(name: str, field: FieldInfo) -> str:
    if field.default is None or field.default == ():
        return ""
    if field.annotation is bool:
        return f", default {'on' if field.default else 'off'}"
    if name in ("memory_budget", "prompt_cache_size", "vram_budget"):
        return ", default auto"
    if name == "max_body_size":
        return f", default {field.default // 2**20}MiB"
    shown = f"{field.default:g}" if isinstance(field.default, float) else field.default
    return f", default {shown}"


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="show what a model needs and how fast it should run",
        description="Show what a model is made of, what a memory budget would do for it, and how fast it "
        "should decode, by a short measurement of drive and memory. Nothing is loaded.",
        allow_abbrev=False,
    )
    inspect.add_argument(
        "model", type=Path, metavar="MODEL", help="GGUF file, or the first one of a split model"
    )
    _add_plan_options(inspect, "--ctx", "--ctx-size")
    inspect.add_argument(
        "--batch-size",
        type=not_negative,
        default=0,
        metavar="N",
        help="prompt tokens evaluated at once; 0 = 512, or fewer where memory is short (default)",
    )
    inspect.add_argument(
        "--prompt-cache-size",
        type=cache_size,
        default=AUTO_PROMPT_CACHE,
        metavar="SIZE",
        help="memory for conversations that wait, in bytes or as 256MiB; 0 = none (default: auto, as serve)",
    )
    inspect.add_argument("--json", action="store_true", help="print JSON")


def _add_profile(commands: Any) -> None:
    profile = commands.add_parser(
        "profile",
        help="find out which experts a model uses most",
        description="Answer prompts greedily and write which experts the answers used, for "
        "`s2moe serve --hot-experts`.",
        allow_abbrev=False,
    )
    profile.add_argument("--model", type=Path, required=True, metavar="PATH", help="GGUF file")
    profile.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="PATH",
        help="text file with one prompt per line; a line that begins with { is a JSON object with "
        "`prompt` or with OpenAI's `messages`",
    )
    profile.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="file to write (default: the model's name with .hot-experts.json, in this directory)",
    )
    profile.add_argument(
        "--max-tokens",
        type=positive,
        default=PROFILE_TOKENS,
        metavar="N",
        help=f"tokens to generate per prompt, at most (default {PROFILE_TOKENS})",
    )
    _add_plan_options(profile, "--ctx-size")


def _add_plan_options(parser: argparse.ArgumentParser, *context_flags: str) -> None:
    """What the memory plan of a command depends on, beside the model."""
    parser.add_argument(
        "--memory-budget",
        type=budget,
        default=AUTO_BUDGET,
        metavar="SIZE",
        help="memory for everything, in bytes or as 1500MiB (default: what there is, less a reserve)",
    )
    parser.add_argument(
        *context_flags,
        type=not_negative,
        default=0,
        metavar="N",
        help="context length in tokens; 0 = the model's own, at most 8192 (default)",
    )


def _add_demo_model(commands: Any) -> None:
    demo = commands.add_parser(
        "demo-model",
        help="build the demo model",
        description="Build the demo model: a small dense model turned into a Mixture of Experts without "
        "training, for demonstration, tests and benchmarks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    demo.add_argument("--experts", type=int, default=DEMO_EXPERTS, metavar="N", help="experts per layer")
    demo.add_argument("--used", type=int, default=DEMO_USED, metavar="N", help="experts used per token")
    demo.add_argument(
        "--sigma", type=float, default=DEMO_SIGMA, metavar="X", help="size of the experts' perturbation"
    )
    demo.add_argument("--seed", type=int, default=DEMO_SEED, metavar="N", help="seed of the random parts")
    demo.add_argument(
        "--out",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="PATH",
        help="file to write (default: the cache)",
    )
    demo.add_argument(
        "--tiny",
        action="store_true",
        help="the variant that the tests use: 8 experts, 2 used; overrides the other three",
    )


def _serve(arguments: dict[str, Any]) -> int:
    settings = load_settings(arguments, arguments.pop("config"))
    # Imported here: help and errors of the settings should not wait for the whole server.
    from s2moe.server import serve
    from s2moe.server.logs import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    for line in unknown_variables(os.environ):
        _log.warning("%s", line)
    try:
        # Before the demo model is built, which takes a while.
        listener = serve.open_socket(settings)
        settings.read_api_key()
        settings.read_chat_template()
        serve.check_hot_experts(settings.hot_experts)
        model = serve.check_model(settings.model) if settings.model is not None else _ensure_demo_model()
        return serve.run(settings, listener, serve.to_configure(settings, model))
    except serve.ServeError as error:
        _exit(EXIT_FAILURE, str(error))


def _ensure_demo_model() -> Path:
    # In a process of its own: what building imports would stay in this one, at the cost of experts.
    command = (sys.executable, "-m", "s2moe.server", "demo-model")
    builder = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if builder.returncode != 0:
        sys.exit(EXIT_FAILURE)  # it has said why
    return Path(builder.stdout.strip())


def _inspect(arguments: dict[str, Any]) -> int:
    from s2moe.engine.inspection import InspectError, inspect_model
    from s2moe.engine.messages import Configure

    configure = Configure(
        model_path=str(arguments["model"].expanduser()),
        n_ctx=arguments["ctx"],
        n_batch=arguments["batch_size"],
        memory_budget_bytes=arguments["memory_budget"],
        prompt_cache_bytes=arguments["prompt_cache_size"],
    )
    try:
        inspection = inspect_model(configure)
    except InspectError as error:
        _exit(EXIT_FAILURE, str(error))
    print(json.dumps(inspection.to_json(), indent=2) if arguments["json"] else "\n".join(inspection.lines()))
    if inspection.refusal:
        _exit(EXIT_FAILURE, inspection.refusal)
    return 0


def _profile(arguments: dict[str, Any]) -> int:
    from s2moe.engine.messages import Configure
    from s2moe.engine.profile import ProfileError, profile

    model = arguments["model"].expanduser()
    configure = Configure(
        model_path=str(model),
        n_ctx=arguments["ctx_size"],
        n_batch=0,
        memory_budget_bytes=arguments["memory_budget"],
        keep_expert_counts=False,
        prompt_cache_bytes=0,
    )
    out = arguments["out"] or Path(f"{model.stem}.hot-experts.json")
    try:
        profile(
            configure,
            arguments["prompts"].expanduser(),
            out.expanduser(),
            max_tokens=arguments["max_tokens"],
            progress=_progress,
        )
    except ProfileError as error:
        _exit(EXIT_FAILURE, str(error))
    print(out)
    return 0


def _quality(arguments: dict[str, Any]) -> int:
    from s2moe.engine.quality import QualityError

    try:
        return quality_command.run(arguments, _progress)
    except QualityError as error:
        _exit(EXIT_FAILURE, str(error))


def _pull(arguments: dict[str, Any]) -> int:
    try:
        return pull_command.run(arguments)
    except PullError as error:
        _exit(error.exit_code, str(error))


def _demo_model(arguments: dict[str, Any]) -> int:
    from s2moe.engine import demo_model

    shape: dict[str, Any] = {name: arguments[name] for name in ("experts", "used", "sigma", "seed")}
    if arguments["tiny"]:
        shape |= demo_model.TINY
    try:
        out = arguments.get("out")
        if out is None:
            path = demo_model.ensure_demo_model(**shape, progress=_progress)
        else:
            path = demo_model.build_demo_model(out, **shape, progress=_progress)
    except demo_model.DemoModelError as error:
        _exit(EXIT_FAILURE, str(error))
    print(path)
    return 0


def _version(_: dict[str, Any]) -> int:
    print(_version_text())
    return 0


def _version_text() -> str:
    return f"s2moe {version('s2moe')}"


_COMMANDS = {
    "serve": _serve,
    "inspect": _inspect,
    "profile": _profile,
    "quality": _quality,
    "pull": _pull,
    "demo-model": _demo_model,
    "version": _version,
}


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _exit(code: int, message: str) -> NoReturn:
    print(f"s2moe: error: {message}", file=sys.stderr)
    sys.exit(code)

"""The clients, what each cannot do, and how its program is run."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from install import NODE, environment, is_installed, python_of

PROGRAMS = Path(__file__).with_name("programs")
TIMEOUT_SECONDS = 180

NO_REASONING = "drops both reasoning fields by design"


@dataclass(frozen=True)
class Client:
    name: str
    """As in docs/clients.md."""
    program: str
    environment: str
    variant: str | None = None
    finish: dict[str, str] = field(default_factory=dict)
    """Its words for reasons to end, where they differ from OpenAI's."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """Cases that the client cannot do with any server, and why."""

    def run(self, url: str, key: str, cases: Path) -> dict[str, Any]:
        """Returns the program's report."""
        assert is_installed(self.environment), (
            f"{self.environment} is not installed in the version of versions.toml; run `make test-clients`"
        )
        arguments = [url, key, str(cases), *([self.variant] if self.variant else [])]
        if self.environment == NODE:
            # an ES module finds its packages from where it lies
            for each in PROGRAMS.glob("*.mjs"):
                shutil.copy(each, environment(NODE))
            command = ["node", self.program]
        else:
            command = [str(python_of(self.environment)), str(PROGRAMS / self.program)]
        result = subprocess.run(
            [*command, *arguments],
            cwd=environment(self.environment),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-4000:]
        report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return report


_AI_SDK_FINISH = {"tool_calls": "tool-calls"}
CLIENTS = (
    Client("openai (Python)", "with_openai.py", "openai"),
    Client("openai (Node)", "with_openai.mjs", NODE),
    Client(
        "langchain-openai",
        "with_langchain.py",
        "langchain-openai",
        unsupported={"reasoning": NO_REASONING, "reasoning_stream": NO_REASONING},
    ),
    Client(
        "litellm",
        "with_litellm.py",
        "litellm",
        unsupported={"schema_stream": "gives the text of a stream, which the caller parses"},
    ),
    Client(
        "llm",
        "with_llm.py",
        "llm",
        unsupported={
            "reasoning": "reads reasoning in the Responses API only",
            "reasoning_stream": "reads reasoning in the Responses API only",
            "busy": "has no switch for the retries of the openai package below it",
        },
    ),
    Client(
        "instructor",
        "with_instructor.py",
        "instructor",
        unsupported={
            "stream": "is for structured answers",
            "reasoning": "is for structured answers",
            "reasoning_stream": "is for structured answers",
            "one_call": "one call is an answer by a tool; see schema_by_tool",
            "one_call_stream": "one call is an answer by a tool; see schema_by_tool",
            "two_calls_stream": "does not stream parallel calls",
            "tool_result": "runs no tools",
            "busy_once": "the retries are the openai package's",
        },
    ),
    Client("Vercel AI SDK, openai-compatible", "with_ai_sdk.mjs", NODE, "compatible", _AI_SDK_FINISH),
    Client(
        "Vercel AI SDK, openai (chat)",
        "with_ai_sdk.mjs",
        NODE,
        "openai",
        _AI_SDK_FINISH,
        {"reasoning": NO_REASONING, "reasoning_stream": NO_REASONING},
    ),
    Client(
        "anthropic (Python)",
        "with_anthropic.py",
        "anthropic",
        finish={"stop": "end_turn", "tool_calls": "tool_use"},
    ),
)

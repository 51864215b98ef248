"""A text of the model's own: prompts and its answers to them, for `s2moe quality --text`.

    .venv/bin/python -m s2moe.bench.own_text --out own.txt [--model PATH] [--workloads qa,code,…]
                                             [--prompts 10] [--tokens 110]

Conversations of bench/prompts as the chat template writes them, each with the greedy answer of plain
decoding. Needs memory for the whole model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from s2moe.bench.prompts import N_PROMPTS, WORKLOADS, prompts
from s2moe.engine.demo_model import ensure_demo_model
from s2moe.engine.errors import EngineStartError, RequestError
from s2moe.engine.generation import Generation
from s2moe.engine.messages import Configure, Generate, Sampling, Speculation, Step
from s2moe.engine.planned_model import PlannedModel

DEFAULT_WORKLOADS: Final = "qa,code,maths,translate"
N_CTX: Final = 1024
_PLAIN: Final = Speculation(method="off")


def answer(model: PlannedModel, name: str, messages_json: bytes, n_tokens: int) -> str:
    """Raises RequestError."""
    request = Generate(
        request_id=name,
        messages_json=messages_json,
        sampling=Sampling(temperature=0.0),
        max_tokens=n_tokens,
    )
    events = Generation(model, request).run()
    return "".join(event.content for event in events if isinstance(event, Step))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="own_text", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--model", type=Path, help="GGUF (default: the 64-expert demo model, sigma 0.2)")
    parser.add_argument("--workloads", default=DEFAULT_WORKLOADS, metavar="A,B", help=",".join(WORKLOADS))
    parser.add_argument("--prompts", type=int, default=N_PROMPTS, metavar="N", help="of each workload")
    parser.add_argument("--tokens", type=int, default=110, help="per answer, at most")
    arguments = parser.parse_args(argv)
    workloads = arguments.workloads.split(",")
    if unknown := [name for name in workloads if name not in WORKLOADS]:
        parser.error(f"--workloads: {unknown[0]!r} is not one of {', '.join(WORKLOADS)}")
    path = arguments.model or ensure_demo_model(experts=64, used=8, sigma=0.2, progress=print)
    parts: list[str] = []
    try:
        model = PlannedModel(Configure(model_path=str(path), n_ctx=N_CTX, speculation=_PLAIN))
        for workload in workloads:
            for index, messages in enumerate(prompts(workload)[: arguments.prompts]):
                messages_json = json.dumps(messages).encode()
                chat = json.loads(model.chat_template.apply(b'{"messages":%b}' % messages_json))
                text = answer(model, f"{workload}-{index}", messages_json, arguments.tokens)
                parts.append(chat["prompt"] + text + "\n")
        model.close()
        arguments.out.write_text("".join(parts), encoding="utf-8")
    except (EngineStartError, RequestError, OSError) as error:
        parser.exit(1, f"own_text: error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes a model's logits to a file, computed by the libllama in LLAMA_CPP_LIB_PATH.

    python evaluate.py MODEL OUT.npy

Batches of 1, 7 and 40 tokens follow each other on one context. A process of its own, since two builds of one
library do not fit into the same process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from llama_model import LlamaModel

BATCHES = (1, 7, 40, 1, 1)


def main(model_path: str, out: str) -> None:
    with LlamaModel(Path(model_path), n_ctx=256, n_threads=2) as model:
        position = 0
        rows = []
        for n_tokens in BATCHES:
            tokens = [(17 + 31 * (position + i)) % (model.n_vocab - 10) for i in range(n_tokens)]
            rows.append(model.decode(tokens, position=position))
            position += n_tokens
    np.save(out, np.concatenate(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])

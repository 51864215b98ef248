"""The premise of self-speculative decoding, measured: `python -m s2moe.bench.premise`."""

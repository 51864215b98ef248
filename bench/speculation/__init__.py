"""Speculative decoding against plain decoding under memory limits: `python -m s2moe.bench.speculation`."""

"""Pure filters between sampled bytes and the text a client sees: bytes → stops → reasoning."""

"""Pure encoders: engine events in, OpenAI objects or bytes out; no I/O and no clock."""

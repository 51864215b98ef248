"""The engine: one process, one model, one running request. See docs/architecture.md."""

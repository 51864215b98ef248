"""`s2moe pull`: GGUF files from a Hugging Face hub, resumable and checked. See docs/models.md."""

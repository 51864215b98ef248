"""Which of llama.cpp's own server tests are run, on which server, and why the others are not."""

from __future__ import annotations

from typing import Final

MODEL: Final = "model"
"""`s2moe serve` on the small demo model."""
SCRIPT: Final = "script"
"""The front end on an engine that says SAID, for tests that look for words of another model."""
KEY: Final = "key"
"""As SCRIPT, with an API key."""
SAID: Final = "Suddenly Timmy was going to bed"
API_KEY: Final = "sk-this-is-the-secret-key"

SELECTED: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "test_basic.py": {MODEL: ("test_server_start_simple", "test_server_models")},
    "test_chat_completion.py": {
        MODEL: (
            "test_chat_template_continue_final_message_mutual_exclusion",
            "test_completion_with_response_format",
            "test_completion_with_grammar",
            "test_completion_with_invalid_grammar",
            "test_invalid_chat_completion_req",
            "test_chat_completion_with_timings_per_token",
            "test_logprobs",
            "test_logprobs_stream",
            "test_logit_bias",
            "test_chat_completions_token_count",
        ),
        SCRIPT: ("test_chat_completion_with_openai_library", "test_chat_completions_multiple_choices"),
    },
    "test_compat_anthropic.py": {
        MODEL: (
            "test_anthropic_messages_basic",
            "test_anthropic_messages_with_system",
            "test_anthropic_messages_multipart_content",
            "test_anthropic_messages_conversation",
            "test_anthropic_messages_streaming",
            "test_anthropic_count_tokens",
            "test_anthropic_count_tokens_with_system",
            "test_anthropic_count_tokens_no_max_tokens",
            "test_anthropic_tool_use_basic",
            "test_anthropic_tool_result",
            "test_anthropic_tool_result_with_text",
            "test_anthropic_tool_result_error",
            "test_anthropic_tool_streaming",
            "test_anthropic_stop_sequences",
            "test_anthropic_temperature",
            "test_anthropic_top_p",
            "test_anthropic_top_k",
            "test_anthropic_missing_messages",
            "test_anthropic_streaming_content_block_indices",
            "test_anthropic_thinking",
            "test_anthropic_metadata",
            "test_anthropic_vs_openai_different_response_format",
        ),
    },
    "test_compat_oai_responses.py": {
        SCRIPT: ("test_responses_with_openai_library", "test_responses_stream_with_openai_library"),
    },
    "test_completion.py": {
        SCRIPT: ("test_completion_with_openai_library", "test_completion_stream_with_openai_library"),
    },
    "test_security.py": {
        KEY: (
            "test_access_public_endpoint",
            "test_incorrect_api_key",
            "test_openai_library_correct_api_key",
        ),
    },
    "test_tokenize.py": {MODEL: ("test_tokenize_detokenize", "test_tokenize_with_pieces")},
}

_COUNTS = "counts tokens, or looks for text, of the model and template that it was written with"
_VERBOSE = "looks at the prompt in llama-server's `__verbose`; the template is tested in tests/native"
_NATIVE = "llama-server's own /completion, which is not part of this server"
_SLOTS = "slots, which this server does not have"
_IMAGES = "images"
_FLAGS = "needs a server with flags of llama-server"
_CORS = "wants llama-server's own CORS headers; ours are tested in tests/server/test_server_middleware.py"

DESELECTED: Final[dict[str, dict[str, str]]] = {
    "test_basic.py": {
        "test_server_multiple_addresses": _FLAGS,
        "test_server_props": _SLOTS,
        "test_server_slots": _SLOTS,
        "test_load_split_model": "loads a model from a hub",
        "test_no_ui": _FLAGS,
        "test_server_model_aliases_and_tags": "one model has one name here",
    },
    "test_chat_completion.py": {
        "test_chat_completion": _COUNTS,
        "test_chat_completion_cached_tokens": _COUNTS,
        "test_chat_completion_stream": _COUNTS,
        "test_chat_template": _VERBOSE,
        "test_chat_template_assistant_prefill": _VERBOSE,
        "test_chat_template_continue_final_message_vllm_compat": _VERBOSE,
        "test_verbose_debug": _VERBOSE,
        "test_apply_chat_template": _FLAGS,
        "test_completion_with_json_schema": "a schema outside of response_format",
        "test_context_size_exceeded": "wants llama-server's own type of error; ours is OpenAI's",
        "test_context_size_exceeded_stream": "as test_context_size_exceeded",
        "test_return_progress": _COUNTS,
    },
    "test_compat_anthropic.py": {
        "test_anthropic_empty_messages": "wants an answer to no message; here it is a 400, as from Anthropic",
        "test_anthropic_tool_result_with_image": _IMAGES,
        "test_anthropic_vision_format_accepted": _IMAGES,
        "test_anthropic_vision_base64_with_multimodal_model": _IMAGES,
        "test_anthropic_thinking_history_in_count_tokens": _FLAGS,
        "test_anthropic_thinking_history_in_template": _FLAGS,
        "test_anthropic_thinking_with_reasoning_model": "loads a model from a hub",
    },
    "test_compat_oai_responses.py": {
        "test_responses_stream_with_llama_telemetry": "progress and timings in the events of /v1/responses",
    },
    "test_completion.py": dict.fromkeys(
        (
            "test_completion",
            "test_completion_stream",
            "test_completion_stream_vs_non_stream",
            "test_consistent_result_same_seed",
            "test_different_result_different_seed",
            "test_consistent_result_different_batch_size",
            "test_cache_vs_nocache_prompt",
            "test_nocache_long_input_prompt",
            "test_json_prompt_no_mtmd",
            "test_json_prompt_mtm_error_when_not_supported",
            "test_completion_with_tokens_input",
            "test_completion_parallel_slots",
            "test_completion_unified",
            "test_completion_response_fields",
            "test_n_probs",
            "test_n_probs_stream",
            "test_n_probs_post_sampling",
            "test_n_probs_post_backend_sampling",
            "test_logit_bias",
            "test_cancel_request",
            "test_completion_prompt_cache",
        ),
        _NATIVE,
    )
    | {"test_completion_stream_with_openai_library_stops": "loads a model from a hub"},
    "test_security.py": {
        "test_correct_api_key": _NATIVE,
        "test_correct_api_key_anthropic_header": _NATIVE,
        "test_access_static_assets_without_api_key": "files of another page",
        "test_cors_options": _CORS,
        "test_cors_origins_localhost_reflects": "takes names of headers for case-sensitive",
        "test_cors_origins_localhost_rejects": _CORS,
        "test_cors_origins_defaults_to_localhost_with_tools_enabled": _FLAGS,
        "test_cors_proxy_only_forwards_explicit_proxy_headers": "a proxy, which this server does not have",
        "test_local_media_file": _IMAGES,
    },
    "test_tokenize.py": {"test_tokenize_with_bos": _COUNTS},
}

_CHAT: Final = "test_chat_completion.py::"
DESELECTED_CASES: Final[dict[str, str]] = {
    _CHAT
    + 'test_completion_with_response_format[response_format0-6-"42"]': "six tokens of another vocabulary",
    _CHAT + "test_invalid_chat_completion_req[messages7]": "two answers in a row are accepted",
    "test_security.py::test_access_public_endpoint[/models]": "the list of models needs the key here",
}

OTHER_FILES: Final[dict[str, str]] = {
    "test_compat_gcp.py": _FLAGS,
    "test_ctx_shift.py": "shifting the context, which this server does not do",
    "test_embedding.py": "needs an embedding model from a hub",
    "test_ignore_eos.py": _NATIVE,
    "test_infill.py": "infill, which this server does not have",
    "test_kv_keep_only_active.py": _SLOTS,
    "test_lora.py": "LoRA adapters",
    "test_mcp_servers.py": "MCP servers",
    "test_metrics.py": "llama-server's names; ours are tested in tests/server/test_server_metrics.py",
    "test_proxy.py": "a proxy, which this server does not have",
    "test_rerank.py": "reranking",
    "test_router.py": "several models",
    "test_sleep.py": "sleeping",
    "test_slot_save.py": _SLOTS,
    "test_speculative.py": "draft models",
    "test_stream.py": "streams that are resumed",
    "test_template.py": "needs a server per template; the same templates are tested in tests/native",
    "test_tool_call.py": "needs a server per template, or models from a hub",
    "test_tools_builtin.py": "tools of the server's own",
    "test_vision_api.py": _IMAGES,
}

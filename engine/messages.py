"""The wire contract between the front end and the engine process.

Transport: one inherited `socketpair` (AF_UNIX, SOCK_STREAM). Each frame is a 4-byte big-endian
payload length followed by one msgpack-encoded struct of this module. Structs are tagged maps, so a
receiver skips fields that it does not know. Rules for change: fields are only appended, each with a
default; a field is never renamed, retyped or removed; anything else raises PROTOCOL_VERSION.

Order of a connection:

    engine    → Hello
    front end → Configure
    engine    → LoadProgress*  → Ready | Fatal
    front end → Generate | Abort | Query | Ping | Shutdown       (any number)
    engine    → for each Generate, in this order: Started, PrefillProgress*, Step*, then exactly
                one of Finished and Failed (Failed may come first, alone)
                exactly one reply for each Query, Pong for each Ping, EngineStats at any time

One Generate runs at a time: the front end sends the next one only after Finished or Failed of the
one before. A Query that needs no more than the vocabulary and the chat template (Tokenize, Detokenize,
ApplyTemplate) is answered also while a Generate runs, one Query after the other; Embed waits for its turn
between two Generates. EOF on either side means that the other process is gone.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

PROTOCOL_VERSION: Final = 3
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
LOAD_DURATION_BOUNDS_SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
)
"""Upper bounds of the buckets of ExpertActivity.load_duration_counts; a last one has no bound."""
STEP_DURATION_BOUNDS_SECONDS: Final = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04),
    *(0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
)
"""Upper bounds of the buckets of StepDurations.counts, those of duration_histogram in the library; a last one
has no bound."""
_LENGTH: Final = struct.Struct(">I")


class ProtocolError(Exception):
    """The peer sent a frame that this side cannot accept: too long, malformed or of another version."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag_field="type"):
    """Base of every wire struct; the tag on the wire is the class name."""


# ── front end → engine ──────────────────────────────────────────────────────────────────────────


class Speculation(Message, frozen=True, tag=True):
    """How drafts are made and verified. None = the server's setting, and there the method's default. Names,
    ranges and meanings are those of s2moe_speculator_begin() in s2moe.h."""

    method: str | None = None
    """`s2moe`, `expert-skip`, `cascade` or `off`."""
    preset: str | None = None
    """`exact`, `balanced` or `fast`."""
    exact: bool | None = None
    draft_experts: int | None = None
    max_nodes: int | None = None
    reuse_strength: float | None = None
    reuse_cap: int | None = None
    error_budget: float | None = None
    single_token_bias: bool | None = None
    adaptive: bool | None = None
    reuse_gating: bool | None = None
    shared_context: bool | None = None


class Configure(Message, frozen=True, tag=True):
    """Load this model. Sent once, after Hello."""

    model_path: str
    n_ctx: int = 0
    """Context length in tokens; 0 = the smaller of the model's training context and 8,192."""
    n_batch: int = 512
    """Prompt tokens evaluated per native call; 0 = 512, or fewer where memory is short."""
    n_threads: int = 0
    """Compute threads; 0 = one per physical core that this process may use."""
    device: str = "cpu"
    chat_template: str | None = None
    """Jinja source that replaces the model's own chat template."""
    hot_experts_path: str | None = None
    """File that says which experts to read ahead of the first request; None = those of earlier runs."""
    keep_expert_counts: bool = True
    """Whether to keep in the cache directory how often experts are used."""
    memory_budget_bytes: int = 0
    """What front end and engine may take together; 0 = what the machine has, less a reserve."""
    front_end_bytes: int = 0
    """The resident set of the front end as of the first start, with which the engine plans; the front end is
    then the engine's parent process and is watched by it. 0 = the front end does not count."""
    io: str = "auto"
    """How experts are read: `direct` or `buffered`."""
    reader: str = "auto"
    """`auto`, `io_uring` or `threads`."""
    expert_trace_path: str | None = None
    """Where to write one line of JSON per layer of each decode."""
    speculation: Speculation = Speculation()
    """What requests get that do not say otherwise."""
    vram_budget_bytes: int = 0
    """With a GPU: what the model, its KV cache, its buffers and slots for experts may take of its memory; 0 =
    what is free, less a reserve."""
    expert_policy: str = "cache"
    """`cache`, or for comparison `static`: the most used experts stay, the others never do."""
    prompt_cache_bytes: int = -1
    """Host memory for the KV rows of other conversations, part of the budget; 0 = none, -1 = a tenth of what
    the plan has left beyond the experts' floor and those of one token, at most two whole contexts and 1 GiB,
    and nothing that all experts need where they fit."""
    prompt_cache_dir: str | None = None
    """Where these rows are kept between runs; None = nowhere."""


class Sampling(Message, frozen=True, tag=True):
    """How the next token is chosen. None = the model's recommendation (GGUF `general.sampling.*`), else
    llama.cpp's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    """0 … 2³²−1; None = a fresh random seed."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    logit_bias: dict[int, float] = {}
    grammar: str | None = None
    """GBNF grammar that constrains the whole answer."""


class Generate(Message, frozen=True, tag=True):
    """Answer a conversation."""

    request_id: str
    messages_json: bytes = b""
    """JSON array of OpenAI chat messages: `content` is a string or null, roles system, user, assistant, tool;
    `tool_calls` (with `arguments` as a string of JSON), `tool_call_id`, `reasoning_content` where they apply.
    Empty: there is a `prompt` or `prompt_tokens` instead."""
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    """Upper bound on generated tokens; None = until the context is full."""
    stop: list[str] = []
    """Non-empty strings that end the answer; the one that ends first wins and is not returned."""
    speculation: Speculation = Speculation()
    """What differs from the server's setting."""
    chat_options_json: bytes = b"{}"
    """The other keys of the request of s2moe_chat_apply() in s2moe.h: `tools`, `tool_choice`,
    `parallel_tool_calls`, `json_schema`, `enable_thinking`, `chat_template_kwargs`,
    `continue_final_message`; and the engine's own `strict_schema`: true = a json_schema of which a part
    cannot be enforced is an error. Only with messages."""
    prompt: str | None = None
    """A raw prompt: no chat template, and the answer is not parsed. Special tokens in it are parsed."""
    prompt_tokens: list[int] | None = None
    """The same as tokens, nothing added."""
    n_top_logprobs: int | None = None
    """0 … 20: log probabilities of each token, and of so many of the likeliest; None = none."""
    ignore_eos: bool = False
    """Whether the model may not end its turn: for benchmarks."""
    own_call_ids: bool = False
    """Whether no id of a tool call is the one that the model wrote: choices beside each other would have the
    same ids."""


class Abort(Message, frozen=True, tag=True):
    """Stop the named request, whether it runs or still waits in the engine. Ignored for any other id."""

    request_id: str
    """Of a Generate, or the query_id of an Embed, which is then answered with QueryFailed."""


class Tokenize(Message, frozen=True, tag=True):
    """→ Tokenized"""

    query_id: str
    text: str
    add_special: bool = False
    """Whether the tokens that the vocabulary wants around a prompt (BOS) are added."""
    parse_special: bool = True
    """Whether text such as `<|im_end|>` becomes the control token of that name."""


class Detokenize(Message, frozen=True, tag=True):
    """→ Detokenized"""

    query_id: str
    tokens: list[int]


class ApplyTemplate(Message, frozen=True, tag=True):
    """→ Rendered"""

    query_id: str
    messages_json: bytes
    """As in Generate."""
    chat_options_json: bytes = b"{}"
    """As in Generate."""


class Embed(Message, frozen=True, tag=True):
    """→ Embedded; QueryFailed with `unsupported` for a model that gives no embeddings."""

    query_id: str
    texts: list[str] = []
    token_lists: list[list[int]] = []
    """Behind the texts; nothing is added to them."""


class Ping(Message, frozen=True, tag=True):
    nonce: int


class Shutdown(Message, frozen=True, tag=True):
    """Finish nothing, free the model, exit 0."""


# ── engine → front end ──────────────────────────────────────────────────────────────────────────


class Hello(Message, frozen=True, tag=True):
    protocol_version: int
    pid: int
    engine_version: str
    llama_build: str
    capabilities: list[str] = []


class LoadProgress(Message, frozen=True, tag=True):
    phase: str
    """`library`, `plan`, `model`, `context`, `warmup`."""
    fraction: float
    """0 … 1 of this phase."""
    detail: str = ""
    plan: Plan | None = None
    """Once, before anything is loaded, so that it is known if loading fails; what is measured after the load
    comes with Ready."""


class ServingDevice(Message, frozen=True, tag=True):
    """What the model runs on."""

    kind: str
    """`cpu` or `cuda`."""
    name: str = ""
    """As the driver or the kernel calls it; empty = not known."""
    compute_capability: str = ""
    """Of a GPU: `8.9`."""
    total_bytes: int = 0
    """Memory of a GPU, which may be the machine's; 0 = not a GPU."""


class ModelInfo(Message, frozen=True, tag=True):
    architecture: str
    name: str
    quantization: str
    size_bytes: int
    n_params: int
    n_ctx: int
    n_ctx_train: int
    n_layer: int
    n_vocab: int
    n_expert: int = 0
    """Experts per MoE layer; 0 for a dense model."""
    n_expert_used: int = 0
    """The model's own k: experts per token."""
    n_moe_layer: int = 0
    n_threads: int = 0
    device: str = "cpu"
    system_fingerprint: str = ""
    """`b<build>-<commit>` of llama.cpp plus the patch revision."""
    longest_piece_bytes: int = 0
    """Of the text that one token stands for; 0 = not known."""
    speculation_method: str = "off"
    """What requests get by default; `off` also where the model cannot be drafted for."""
    speculation_preset: str = ""
    speculation_limit: str = ""
    """Why drafts are not possible, or only in part; empty if they are."""
    chat_template: str = ""
    """Jinja source in use."""
    bos_token: str = ""
    eos_token: str = ""
    n_embd: int = 0
    gives_embeddings: bool = False
    """Whether Embed works; such a model answers no Generate."""
    default_sampling: Sampling = Sampling()
    """What requests get that do not say otherwise; its None are not known, or random for the seed."""
    devices: list[ServingDevice] = []
    """The processor, or all GPUs that the model is spread over."""


class Plan(Message, frozen=True, tag=True):
    """How the memory budget was divided at start."""

    budget_bytes: int
    budget_source: str = ""
    """Who set it, for people."""
    pools: list[MemoryPool] = []
    """Their `budget_bytes`."""
    n_slots: int = 0
    """Experts that fit into the expert cache; about, where layers have experts of different sizes."""
    n_experts: int = 0
    """Experts of all layers together; 0 for a dense model."""
    n_cycle_slots: int = 0
    """Experts that one token uses."""
    floor_bytes: int = 0
    """The least budget that this configuration can be served with."""
    lines: list[str] = []
    """The plan in words, for the log."""
    warnings: list[str] = []


class Ready(Message, frozen=True, tag=True):
    model: ModelInfo
    load_seconds: float = 0.0
    plan: Plan | None = None
    """None: nothing was planned, as for a model on a GPU."""


WRONG_SETTING_CODES: Final = frozenset(
    {
        "budget_too_large",
        "budget_too_small",
        "device_not_built",
        "expert_policy_unavailable",
        "hot_experts_invalid",
        "hot_experts_missing",
        "invalid_device",
        "invalid_setting",
        "model_not_found",
        "model_unreadable",
        "model_unsupported",
        "prompt_cache_dir_unusable",
        "reader_unavailable",
        "template_invalid",
        "trace_unavailable",
        "trace_unwritable",
    }
)
"""Codes of Fatal that blame a setting: with this build and these files it never works. Others may pass by
themselves, such as a lack of memory or of a driver, or blame no setting."""


class Fatal(Message, frozen=True, tag=True):
    """The engine cannot start; it exits with a non-zero code after this."""

    code: str
    """Of an EngineStartError; see WRONG_SETTING_CODES."""
    message: str
    """One line: what went wrong and what to do."""
    retryable: bool = False
    """False: the same configuration will fail again, so do not restart."""


class Started(Message, frozen=True, tag=True):
    """The prompt was templated and tokenised; prefill begins."""

    request_id: str
    n_prompt_tokens: int
    n_cached_tokens: int = 0
    """Leading prompt tokens whose KV is reused."""


class PrefillProgress(Message, frozen=True, tag=True):
    request_id: str
    n_done_tokens: int
    """Prompt tokens in the KV cache, cached ones included."""


class ToolCallDelta(Message, frozen=True, tag=True):
    """Part of a tool call. The first one of a call has id and name, and never again."""

    index: int
    """0, 1, … in the order of the calls."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """A piece of the JSON text."""


class TopLogprob(Message, frozen=True, tag=True):
    token: int
    piece: bytes
    """May be part of a character."""
    logprob: float


class TokenLogprob(Message, frozen=True, tag=True):
    """How likely the model found a token that it chose: natural logarithm, of the model's own distribution,
    before penalties, grammar and temperature."""

    token: int
    piece: bytes
    logprob: float
    """At least -9999: JSON has no infinity."""
    top: list[TopLogprob] = []
    """The likeliest, best first."""


class Step(Message, frozen=True, tag=True):
    """Text released by one decode step. Whole UTF-8 characters only, stop strings removed, reasoning and tool
    calls split off. A step that released nothing is not sent, but for the last one, which may only carry
    n_tokens and logprobs."""

    request_id: str
    content: str = ""
    reasoning: str = ""
    n_tokens: int = 1
    """Tokens since the last Step. Those that a stop string may still take back count once that is decided, so
    that a Step may have text of tokens that were counted before, and none of its own."""
    sampled_ns: int = 0
    """CLOCK_MONOTONIC at which the native call that gave the last of these tokens returned."""
    tool_calls: list[ToolCallDelta] = []
    logprobs: list[TokenLogprob] = []
    """Of the n_tokens tokens, if asked for; without an end-of-turn token and what belongs to a stop
    string."""


class ExpertUse(Message, frozen=True, tag=True):
    """What one phase of one request asked of the expert cache."""

    n_lookups: int = 0
    """Experts of a layer that a decode needed; each counts once per layer and decode."""
    n_misses: int = 0
    read_bytes: int = 0
    """Read on demand or ahead; warm-up in the background is not the request's."""
    stall_seconds: float = 0.0
    """Time that computing waited for reads."""


class CostFit(Message, frozen=True, tag=True):
    """How well a cost model predicts the seconds of an evaluation: of the last 256."""

    r2: float = 0.0
    mape: float = 0.0
    """Mean absolute percentage error, 0 … 1."""
    n: int = 0
    """Evaluations that it was fitted to."""


class SpeculationReport(Message, frozen=True, tag=True):
    """What speculation did in one request. Counts are of steps of the target, drafts (nodes of their trees),
    rows (tokens of a batch) or experts of a layer."""

    method: str = "off"
    """What was used: `off` also where the model or an error forbids more."""
    preset: str = ""
    disabled_reason: str = ""
    """Why nothing was drafted: `unsupported`, `error`, `context_full`; empty: it was allowed."""
    n_steps: int = 0
    n_iterations: int = 0
    """Steps that verified at least one draft."""
    n_tokens: int = 0
    n_drafted: int = 0
    n_admitted: int = 0
    n_accepted: int = 0
    admitted_by_depth: list[int] = []
    accepted_by_depth: list[int] = []
    acceptance_lengths: list[int] = []
    """Iterations by number of accepted drafts, from 0."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    sample_seconds: float = 0.0
    stall_seconds: float = 0.0
    n_experts_touched: int = 0
    n_experts_exact: int = 0
    """What the exact router would have touched."""
    n_row_experts: int = 0
    n_touched_multi: int = 0
    n_exact_multi: int = 0
    """The two above over evaluations of several rows only: divided by n_row_experts they are reuse ratios."""
    n_missing: int = 0
    n_missing_exact: int = 0
    displaced_weight: float = 0.0
    n_token_layers: int = 0
    error_budget: float = 0.0
    n_committed_rows: int = 0
    n_biased_rows: int = 0
    routing_hits: int = 0
    routing_misses: int = 0
    routing_extra: int = 0
    n_graph_builds: int = 0
    controller_state: str = "off"
    """`drafting`, `paused`, `probing` or `off`."""
    n_pauses: int = 0
    """Times that drafting did not pay and stopped, in this request."""
    n_probes: int = 0
    """Times that it was tried again, in this request."""
    draft_length: float = 0.0
    """Mean drafts admitted per iteration lately, of requests that the controller paces."""
    verify_fit: CostFit = CostFit()
    draft_fit: CostFit = CostFit()
    single_seconds: float = 0.0
    """Expected time of a single-token evaluation."""
    is_paced: bool = False
    """Whether the controller decides if steps draft: not for baselines and fixed trees."""
    judged_drafts: list[list[tuple[int, int, float]]] = []
    """[7][10] by depth, from 1, and by tenth of the predicted probability of acceptance: drafts behind an
    accepted prefix, those of them that were accepted, and the sum of their predicted probabilities."""


class StepDurations(Message, frozen=True, tag=True):
    """How long evaluations of one kind took."""

    counts: list[int]
    """[len(STEP_DURATION_BOUNDS_SECONDS) + 1]"""
    seconds: float
    """All of them together."""


class Timings(Message, frozen=True, tag=True):
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    n_decode_steps: int = 0
    prefill_experts: ExpertUse | None = None
    """None: the model has no expert cache."""
    decode_experts: ExpertUse | None = None
    speculation: SpeculationReport | None = None
    """None: the request was served without a speculator."""
    grammar_seconds: float = 0.0
    """Making a sampler that follows a grammar; 0: there was none."""
    step_durations: dict[str, StepDurations] = {}
    """By phase: `draft` all drafts of a step, `verify` an evaluation that verified drafts, `plain` one of a
    single token: nothing was drafted in its step, or nothing that was worth verifying."""


class Finished(Message, frozen=True, tag=True):
    request_id: str
    reason: str
    """`stop`, `length`, `tool_calls` or `cancelled`."""
    n_prompt_tokens: int = 0
    n_cached_tokens: int = 0
    n_completion_tokens: int = 0
    n_reasoning_tokens: int = 0
    timings: Timings = Timings()
    stop_string: str | None = None


class Failed(Message, frozen=True, tag=True):
    """This request failed; the engine goes on."""

    request_id: str
    code: str
    """`context_length_exceeded`, `template_error`, `invalid_grammar`, `invalid_value`, `internal`, …"""
    message: str
    param: str | None = None
    n_prompt_tokens: int = 0
    n_ctx: int = 0
    timings: Timings = Timings()
    """Until the failure."""


class Tokenized(Message, frozen=True, tag=True):
    query_id: str
    tokens: list[int]
    pieces: list[bytes] = []
    """Bytes of each token."""


class Detokenized(Message, frozen=True, tag=True):
    query_id: str
    text: bytes
    """May begin or end within a character."""


class Rendered(Message, frozen=True, tag=True):
    query_id: str
    prompt: str
    n_tokens: int
    """That the prompt has for the model."""


class Embedded(Message, frozen=True, tag=True):
    query_id: str
    vectors: list[list[float]]
    """[texts and token lists][n_embd], of length 1 each"""
    n_tokens: list[int]


class QueryFailed(Message, frozen=True, tag=True):
    query_id: str
    code: str
    """As in Failed, or `unsupported`."""
    message: str
    param: str | None = None
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class Pong(Message, frozen=True, tag=True):
    """Answered by a thread of its own, so it comes during a long decode too."""

    nonce: int
    state: str
    """`loading`, `idle`, `prefill`, `decode`."""
    request_id: str | None = None
    step_age_seconds: float = 0.0
    """Time since the last native call returned (0 while idle). Large = hung rather than busy."""


class ExpertPhase(Message, frozen=True, tag=True):
    """Increments of what the expert cache counts by phase."""

    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    """Lookups that found the expert resident or on its way because of a prefetch."""
    stall_seconds: float = 0.0
    compute_seconds: float = 0.0


class ExpertLoads(Message, frozen=True, tag=True):
    """Increments of experts read for one reason."""

    n_loads: int = 0
    n_bytes: int = 0


class GpuPhase(Message, frozen=True, tag=True):
    """Increments of what slots on a GPU cost by phase."""

    demand: ExpertLoads = ExpertLoads()
    """Experts that were copied into slots while the GPU waited."""
    requests: int = 0
    """Layers for which the GPU waited for the host."""
    copy_seconds: float = 0.0
    """That the GPU took to copy `demand`, without the last layer's."""
    synchronizations: int = 0
    """Times that the host waited for the GPU: in ggml, for the tables of slots, and for the gate."""


class GpuActivity(Message, frozen=True, tag=True):
    """What slots on a GPU cost: increments."""

    prefill: GpuPhase = GpuPhase()
    decode: GpuPhase = GpuPhase()
    prefetch: ExpertLoads = ExpertLoads()
    """Experts that were copied beside its computation."""
    evictions: int = 0


class ExpertActivity(Message, frozen=True, tag=True):
    """What the expert cache did: increments."""

    prefill: ExpertPhase = ExpertPhase()
    decode: ExpertPhase = ExpertPhase()
    demand: ExpertLoads = ExpertLoads()
    prefetch: ExpertLoads = ExpertLoads()
    warmup: ExpertLoads = ExpertLoads()
    load_duration_counts: list[int] = []
    """Experts read, by time from request to the last byte: [len(LOAD_DURATION_BOUNDS_SECONDS) + 1], each
    bucket without those below it; empty = all zero."""
    load_duration_seconds: float = 0.0
    read_seconds: float = 0.0
    """Time during which at least one read was in flight."""
    evictions: int = 0
    prefetches_used: int = 0
    prefetches_late: int = 0
    prefetches_wasted: int = 0
    read_errors: int = 0
    gpu: GpuActivity = GpuActivity()


class ExpertCache(Message, frozen=True, tag=True):
    """What the expert cache is and holds: gauges."""

    resident_experts: int = 0
    resident_bytes: int = 0
    capacity_experts: int = 0
    capacity_bytes: int = 0
    io: str = ""
    """`direct` or `buffered`."""
    reader: str = ""
    """`io_uring` or `threads`."""
    reason: str = ""
    """Why not what `auto` prefers; empty if it is."""
    tier: str = "pageable"
    """Of the memory: `pinned` where a GPU reads it."""
    gpu: GpuSlots | None = None
    """None: experts are computed where the cache has them."""


class GpuSlots(Message, frozen=True, tag=True):
    """Slots on a GPU: gauges."""

    resident_experts: int = 0
    resident_bytes: int = 0
    capacity_experts: int = 0
    capacity_bytes: int = 0


class MemoryPool(Message, frozen=True, tag=True):
    """Memory for one purpose: gauges."""

    pool: str
    """`weights`, `kv`, `compute`, `expert_cache`, `prompt_cache`, `processes` or `reserve`."""
    budget_bytes: int = 0
    """As planned at start."""
    used_bytes: int = 0
    """As measured."""


class EngineStats(Message, frozen=True, tag=True):
    """Increments since the last EngineStats, and gauges as they are now. Sent after Ready, before each
    Finished or Failed, once per second while a request runs, and while the engine idles when something
    changed."""

    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    decode_step_seconds: float = 0.0
    prefill_seconds: float = 0.0
    graph_reuses: int = 0
    kv_cache_tokens: int = 0
    """gauge"""
    kv_cache_capacity_tokens: int = 0
    """gauge"""
    rss_bytes: int = 0
    """gauge: the engine's resident set"""
    experts: ExpertActivity | None = None
    """None: nothing happened, or the model has no expert cache."""
    expert_cache: ExpertCache | None = None
    """gauges; None: the model has no expert cache"""
    memory_pools: list[MemoryPool] = []
    """gauges; empty when there is no plan"""
    memory_available_bytes: int = 0
    """gauge: what may still be taken without swapping, container limits included; 0 = not known"""
    memory_total_bytes: int = 0
    """gauge: what there is, container limits included; 0 = not known"""
    memory_pressure_events: dict[str, int] = {}
    """Increments by what was done about it, such as `shrink_cache`, `grow_cache` or `drop_prompt_cache`."""
    prompt_cache_entries: int = 0
    """gauge: conversations kept beside the KV cache"""
    prompt_cache_bytes: int = 0
    """gauge: what they take"""
    prompt_cache_events: dict[str, int] = {}
    """Increments: `saved`, `restored`, `evicted`, `loaded` (from disk), `failed` (disk); and prompts at which
    part of the KV cache was dropped, `prefix_changed`, or all of it for want of a way to cut it,
    `not_cuttable`."""


Query = Tokenize | Detokenize | ApplyTemplate | Embed
QueryReply = Tokenized | Detokenized | Rendered | Embedded | QueryFailed
ToEngine = Configure | Generate | Abort | Query | Ping | Shutdown
FromEngine = (
    Hello
    | LoadProgress
    | Ready
    | Fatal
    | Started
    | PrefillProgress
    | Step
    | Finished
    | Failed
    | QueryReply
    | Pong
    | EngineStats
)
GenerationEvent = Started | PrefillProgress | Step | Finished | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
_from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """Returns the length prefix and the encoded struct, ready to be written.

    Raises ProtocolError when the message is longer than MAX_FRAME_BYTES.
    """
    payload = _encoder.encode(message)
    length = len(payload)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"message of {length} bytes is longer than the limit {MAX_FRAME_BYTES}")
    return _LENGTH.pack(length) + payload


class FrameReader:
    """Cuts a byte stream into messages: `feed()` bytes as they come, get the messages they complete.

    Not thread-safe; one reader per connection and direction.
    """

    def __init__(self, *, from_engine: bool) -> None:
        self._decode = _from_engine_decoder.decode if from_engine else _to_engine_decoder.decode
        self._buffer = bytearray()
        self.frame_bytes: list[int] = []
        """Sizes on the wire of the messages that the last `feed()` returned, prefix included."""

    def feed(self, data: bytes) -> list[ToEngine | FromEngine]:
        """Raises ProtocolError on a frame that is too long or does not decode; the connection is then
        unusable."""
        if not self._buffer and len(data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data)
            if len(data) == _LENGTH.size + length <= MAX_FRAME_BYTES:
                # one whole frame, as nearly always: a token must not wait for what follows
                self.frame_bytes = [len(data)]
                return [self._decode_frame(data[_LENGTH.size :])]
        if self._buffer:
            self._buffer += data
            data = bytes(self._buffer)
            self._buffer.clear()
        messages: list[ToEngine | FromEngine] = []
        self.frame_bytes = []
        offset = 0
        while len(data) - offset >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, offset)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"frame of {length} bytes is longer than the limit {MAX_FRAME_BYTES}")
            end = offset + _LENGTH.size + length
            if len(data) < end:
                break
            messages.append(self._decode_frame(data[offset + _LENGTH.size : end]))
            self.frame_bytes.append(end - offset)
            offset = end
        self._buffer += data[offset:]
        return messages

    def _decode_frame(self, payload: bytes) -> ToEngine | FromEngine:
        try:
            return self._decode(payload)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"undecodable frame: {error}") from error

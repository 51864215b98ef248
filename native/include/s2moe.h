/*
 * s2moe.h: the C API of libs2moe, the native half of s2moe.
 *
 * It complements llama.h. Models and contexts are created, and freed, with llama.h; the functions here act on
 * them. Everything in libs2moe is reached through this header and nothing else.
 *
 * Conventions
 *
 *   Errors     A function that can fail returns an enum s2moe_status (0 = success, negative = failure), or a
 *              pointer that is NULL on failure. The reason is then in s2moe_last_error(). No C++ exception
 *              leaves a function. After a failure the arguments are as they were before the call, unless the
 *              function says otherwise.
 *   Ownership  s2moe_X_create() gives an object to the caller, who hands it back with s2moe_X_free().
 *              s2moe_X_free(NULL) does nothing. Strings returned through a `char **` belong to the caller:
 *              s2moe_string_free(). Arguments are only read during the call, unless said otherwise.
 *   Pointers   must not be NULL unless the function allows it; that is not checked.
 *   Threads    A llama_context and everything made from it is used by one thread at a time. The functions
 *              marked [any thread] may run beside a decode.
 *   Text       is UTF-8 and NUL-terminated unless a length is given. JSON goes in and out as text.
 */

#ifndef S2MOE_H
#define S2MOE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define S2MOE_API __declspec(dllexport)
#else
#define S2MOE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct llama_model;
struct llama_context;

/* Raised by any change that breaks a caller compiled against the header before. */
#define S2MOE_ABI_VERSION 5

enum s2moe_status {
    S2MOE_OK = 0,
    S2MOE_ERROR_INVALID = -1,      /* an argument, or a value in a JSON argument, is out of its domain */
    S2MOE_ERROR_TEMPLATE = -2,     /* the chat template rejects these messages or cannot be parsed */
    S2MOE_ERROR_GRAMMAR = -3,      /* the grammar does not parse, names no root, or is too ambiguous to follow */
    S2MOE_ERROR_ABORTED = -4,      /* s2moe_abort_request() took effect */
    S2MOE_ERROR_CONTEXT_FULL = -5, /* no room in the KV cache */
    S2MOE_ERROR_NO_MEMORY = -6,    /* an allocation failed */
    S2MOE_ERROR_UNSUPPORTED = -7,  /* the model has no experts, or the backend cannot do this */
    S2MOE_ERROR_INTERNAL = -8,     /* llama.cpp failed for a reason that it logged */
    S2MOE_ERROR_IO = -9,           /* the model file cannot be read, or is damaged, or changed while it was in use */
    S2MOE_ERROR_NUMERIC = -10      /* the model computed NaN or infinity where a logit or a choice of experts belongs */
};

/* ── the library ───────────────────────────────────────────────────────────────────────────────────────── */

/* S2MOE_ABI_VERSION of the library as built. [any thread] */
S2MOE_API int32_t s2moe_abi_version(void);

/*
 * What was built, as a JSON object: "version" (of s2moe), "source" (release of llama-cpp-python, llama.cpp's
 * commit, patch revision), "cuda" (bool), "cuda_toolkit" (its version, "" without CUDA), "cuda_architectures"
 * (list of strings as in CMAKE_CUDA_ARCHITECTURES, empty without CUDA). Nothing is asked of any device. The string
 * lives as long as the library. [any thread]
 */
S2MOE_API const char * s2moe_build_info(void);

/* Why the last failed call of this thread failed: one line, "" when none failed yet. Valid until the next call
 * of this thread. [any thread] */
S2MOE_API const char * s2moe_last_error(void);

/* Frees a string that a function returned through a `char **`; NULL is allowed. [any thread] */
S2MOE_API void s2moe_string_free(char * string);

/* ── Mixture-of-Experts controls ───────────────────────────────────────────────────────────────────────── */

struct s2moe_moe_info {
    int32_t n_layer;       /* layers of the model */
    int32_t n_moe_layer;   /* layers that have experts; 0 for a dense model, and then the rest is 0 too */
    int32_t n_expert;      /* experts per such layer */
    int32_t n_expert_used; /* the model's k: experts per token (the largest, if layers differ) */
};

/* Fills *info. Always succeeds. [any thread] */
S2MOE_API void s2moe_model_moe_info(const struct llama_model * model, struct s2moe_moe_info * info);

/*
 * Sets how many experts each token uses in the following decodes of ctx.
 *
 *   n_expert_used  1 .. the model's k; 0 restores the model's k. A layer whose own k is smaller keeps its own.
 *
 * The KV cache is untouched, so decodes with different values may follow one another on the same sequence.
 * A change costs one graph build in the next decode (about 1 ms), never a reload.
 * Errors: S2MOE_ERROR_INVALID out of range, S2MOE_ERROR_UNSUPPORTED for a dense model.
 */
S2MOE_API int32_t s2moe_set_n_expert_used(struct llama_context * ctx, int32_t n_expert_used);

/* Experts per token in the next decode of ctx; 0 for a dense model. */
S2MOE_API int32_t s2moe_n_expert_used(const struct llama_context * ctx);

/*
 * Turns recording of router decisions on or off for the following decodes of ctx.
 *
 * While on, each decode stores, per MoE layer and token, the ids of the k experts that the router ranks best, k
 * being the model's own even when s2moe_set_n_expert_used() asks for fewer. That is what a full evaluation of
 * the same token in the same state would select. Cost: one small copy per layer, one transfer per micro-batch.
 * Errors: S2MOE_ERROR_UNSUPPORTED for a dense model.
 */
S2MOE_API int32_t s2moe_set_router_recording(struct llama_context * ctx, bool record);

/*
 * The ids that the last decode of ctx recorded. Waits until that decode has finished.
 *
 *   ids    receives a pointer to int32 [n_layer][n_tokens][k], best expert first; every value is -1 where the
 *          layer has no experts, or did not route that token: the last layer evaluates only the tokens whose
 *          logits were asked for. Owned by ctx, valid until its next decode.
 *   shape  receives { n_layer, n_tokens, k }; n_tokens counts the tokens of the whole batch, in its order.
 *
 * Errors: S2MOE_ERROR_INVALID when recording was off during the last decode, or that decode failed.
 */
S2MOE_API int32_t s2moe_router_ids(struct llama_context * ctx, const int32_t ** ids, int32_t shape[3]);

/* Decodes of ctx that reused the compute graph of the one before, since ctx was created. */
S2MOE_API int64_t s2moe_n_graph_reuses(const struct llama_context * ctx);

/* ── expert store and cache ────────────────────────────────────────────────────────────────────────────── */

/*
 * The experts of one model file: where they lie on the drive (the store), and the slots of memory that hold some
 * of them (the cache). A slot holds one expert whole: its gate, up and down matrices, in the layout that the CPU
 * kernels like best. Decodes of a model that was loaded with the store's overrides fetch what they miss by
 * themselves.
 *
 *   s2moe_experts * experts = s2moe_experts_open(path, options, &status);
 *   params.load_mode = LLAMA_LOAD_MODE_NONE;                           weights into anonymous memory
 *   params.tensor_buft_overrides = s2moe_experts_overrides(experts);
 *   llama_model * model = llama_model_load_from_file(path, params);    reads the dense weights only
 *   llama_context * ctx = llama_init_from_model(model, ...);
 *   s2moe_experts_allocate(experts, n_bytes);                          now decodes work
 *   ...
 *   llama_free(ctx); llama_model_free(model); s2moe_experts_free(experts);
 *
 * One store serves one model at a time, and one context of it decodes at a time, through s2moe_decode(): a plain
 * llama_decode() computes the same, but is not told when a read fails.
 *
 * A file that was changed in place (its length or time of change differ) is not read any more: decodes that miss
 * fail with S2MOE_ERROR_IO until the store is opened again, or length and time are what they were.
 */
typedef struct s2moe_experts s2moe_experts;

/* What the headers of a model file say, split files included, as JSON; `path` is the first file. No tensor data
 * are read.
 *
 *   layout_json  receives {
 *     "architecture", "name", "n_layer", "n_ctx_train", "n_vocab",
 *     "n_expert", "n_expert_used": of the model's key-value pairs; 0 for a dense model
 *     "files": [{ "path", "size_bytes" }],
 *     "file_bytes": sum of their sizes, "dense_bytes": tensors that are not experts, "expert_bytes": the experts,
 *     "tensor_types": { type name: bytes },
 *     "classes": [{ "slot_bytes", "n_layers", "n_experts" }]     layers with equally large experts share slots
 *     "layers": [{ "layer", "class", "n_expert", "expert_bytes": of one expert in the file,
 *                  "parts": [{ "tensor", "type", "bytes": of one expert, "file", "offset": of expert 0 }] }] }
 *
 * Errors: S2MOE_ERROR_IO: a file is missing, cannot be read, is no GGUF, or its tensors reach past its end.
 * [any thread] */
S2MOE_API int32_t s2moe_model_layout(const char * path, char ** layout_json);

/*
 * Opens the store. Reads headers only.
 *
 *   path          the GGUF file, or the first file of a split model
 *   options_json  "io": "auto" (default: direct where the file system allows it), "direct" (O_DIRECT, the page cache is
 *                 passed by) or "buffered",
 *                 "reader": "auto" (default: io_uring, else threads), "io_uring" or "threads",
 *                 "queue_depth": reads in flight at most (default 8),
 *                 "policy": "cache" (default: the most useful experts stay) or "static", for comparison: what
 *                 s2moe_experts_warm() names stays for ever, as far as slots go beyond the floor or every expert has
 *                 one. Every other expert is read when a layer needs it and given up, which is no eviction, when the
 *                 layer has been computed. Nothing is read ahead, and s2moe_experts_prefetch() queues nothing
 *   last_status   if not NULL: S2MOE_ERROR_IO as in s2moe_model_layout(), S2MOE_ERROR_UNSUPPORTED (no experts in the
 *                 file; or "reader" or "io" demands what this system refuses), S2MOE_ERROR_INVALID (options)
 */
S2MOE_API s2moe_experts * s2moe_experts_open(const char * path, const char * options_json, int32_t * last_status);

/* Free the contexts and the model first. Waits for reads in flight. */
S2MOE_API void s2moe_experts_free(s2moe_experts * experts);

/* The value of llama_model_params.tensor_buft_overrides; lives as long as `experts`. */
S2MOE_API const void * s2moe_experts_overrides(const s2moe_experts * experts);

/*
 * Sets how much memory the slots may take, and forgets what they held.
 *
 *   capacity_bytes  as many slots are made as fit; at least s2moe_experts_floor_bytes()
 *
 * The memory is reserved here and taken from the system as slots are first filled. Not during a decode.
 * Errors: S2MOE_ERROR_INVALID below the floor, S2MOE_ERROR_NO_MEMORY.
 */
S2MOE_API int32_t s2moe_experts_allocate(s2moe_experts * experts, uint64_t capacity_bytes);

/* Bytes below which a prompt could not be evaluated: the experts of the largest layer of every class. */
S2MOE_API uint64_t s2moe_experts_floor_bytes(const s2moe_experts * experts);

/* Gives slots back to the system until they take at most capacity_bytes, the least useful first; never below the
 * floor. Returns the bytes that they take then. Not during a decode. */
S2MOE_API uint64_t s2moe_experts_shrink(s2moe_experts * experts, uint64_t capacity_bytes);

/* Takes slots back that s2moe_experts_shrink() gave up, until all take at most capacity_bytes; never more than
 * s2moe_experts_allocate() made. They are empty. Returns the bytes that slots take then: with a static list, what they
 * took before. Not during a decode. */
S2MOE_API uint64_t s2moe_experts_grow(s2moe_experts * experts, uint64_t capacity_bytes);

/* How experts are read, as JSON: { "io": "direct"|"buffered", "reader": "io_uring"|"threads", "queue_depth",
 * "reason": why not what "auto" prefers, "" if it is }. Freed with s2moe_string_free(). [any thread] */
S2MOE_API int32_t s2moe_experts_reader(const s2moe_experts * experts, char ** reader_json);

enum s2moe_phase { S2MOE_PHASE_DECODE = 0, S2MOE_PHASE_PREFILL = 1, S2MOE_N_PHASES = 2 };

/* Why an expert was read. */
enum s2moe_trigger {
    S2MOE_TRIGGER_DEMAND = 0,   /* a decode was waiting for it */
    S2MOE_TRIGGER_PREFETCH = 1, /* it was expected to be needed */
    S2MOE_TRIGGER_WARMUP = 2,   /* it filled an unused slot in the background */
    S2MOE_N_TRIGGERS = 3
};

#define S2MOE_N_LOAD_BUCKETS 12
/* Upper bounds in seconds of the buckets of load_duration; a last one has no bound. */
#define S2MOE_LOAD_BUCKETS {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0}

/* Totals since s2moe_experts_open(), but for the gauges. Decodes of up to 8 tokens count as "decode", longer ones as
 * "prefill". One lookup is one expert of one layer in one decode, however many tokens use it; it is a hit, a miss or
 * prefetched. load_bytes counts the blocks that were read, unaligned ends included. */
struct s2moe_expert_stats {
    uint64_t hits[S2MOE_N_PHASES];       /* lookups that found the expert in a slot */
    uint64_t misses[S2MOE_N_PHASES];     /* lookups that had to read it */
    uint64_t prefetched[S2MOE_N_PHASES]; /* lookups that found it in a slot by a prefetch, or on its way already */
    uint64_t loads[S2MOE_N_TRIGGERS];    /* experts read whole */
    uint64_t load_bytes[S2MOE_N_TRIGGERS];
    /* experts by time to the last byte, from the demand or from a prefetch's first read; and the sum of those times */
    uint64_t load_duration_counts[S2MOE_N_LOAD_BUCKETS + 1];
    double load_duration_seconds;
    double read_seconds;                    /* time during which at least one read was in flight */
    double stall_seconds[S2MOE_N_PHASES];   /* compute threads' mean wait for reads */
    double compute_seconds[S2MOE_N_PHASES]; /* in expert matrices, waits taken off */
    uint64_t evictions;
    uint64_t prefetches_used;   /* prefetched experts that had landed when a decode first used them */
    uint64_t prefetches_late;   /* that were still on their way */
    uint64_t prefetches_wasted; /* that were evicted without use */
    uint64_t read_errors;
    uint64_t resident_experts; /* gauge */
    uint64_t resident_bytes;   /* gauge: slots that hold an expert */
    uint64_t capacity_experts; /* gauge: slots */
    uint64_t capacity_bytes;   /* gauge: of all slots */
    uint64_t
        touched_bytes; /* gauge: of them, what has been taken from the system; the rest follows in the background */
};

/*
 * Puts a tier of slots in a GPU's memory above the store: experts are then computed from those slots only, and the
 * store's own slots, in the host's memory, feed them. To be called after s2moe_experts_allocate(), whose capacity can
 * change no more, and before the first decode of `ctx`, whose model must be the store's.
 *
 *   device          "cuda:0" and so on: all layers of the model must be computed there. "host": the CPU stands for a
 *                   GPU, for tests; "host-unpinned", "host-part-pinned": for one that cannot read the host's memory,
 *                   or not all of it; "host-failed-copy": for one whose second copy beside its computation fails;
 *                   "host-watched": for one with a watchdog
 *   capacity_bytes  for slots; at least s2moe_experts_device_floor_bytes()
 *
 * A GPU waits for the host only in layers that use an expert without a slot; experts that s2moe_experts_prefetch()
 * names are copied into slots beside its computation. It is answered during s2moe_decode() and the steps of a
 * speculator only: llama_decode() on `ctx` would wait for ever. Free `ctx` before the store, and ask the store nothing
 * meanwhile.
 *
 * Errors: S2MOE_ERROR_INVALID (arguments, order of calls, policy "static"), S2MOE_ERROR_UNSUPPORTED (no such device in
 * this build or machine, too many experts in a layer), S2MOE_ERROR_NO_MEMORY. [the thread that decodes]
 */
S2MOE_API int32_t s2moe_experts_use_device(s2moe_experts * experts,
                                           struct llama_context * ctx,
                                           const char * device,
                                           uint64_t capacity_bytes);

/* The least capacity for s2moe_experts_use_device(): the experts of one layer. */
S2MOE_API uint64_t s2moe_experts_device_floor_bytes(const s2moe_experts * experts);

/*
 * What s2moe_experts_use_device() made; free *device_json with s2moe_string_free().
 *
 *   device   the driver's name of it
 *   unified  whether host and GPU share their memory
 *   watchdog whether the driver ends kernels that run for some seconds, as those that wait for a slow drive
 *   pinned   whether the GPU reads the store's slots where they are; "reason" tells why not, and then every copy is
 *            staged
 *
 * Errors: S2MOE_ERROR_INVALID without a device.
 */
S2MOE_API int32_t s2moe_experts_device(const s2moe_experts * experts, char ** device_json);

/* Of a tier of slots in a GPU's memory: totals since s2moe_experts_use_device(), but for the gauges. Lookups count as
 * in s2moe_expert_stats, which has the same figures then. */
struct s2moe_device_stats {
    uint64_t hits[S2MOE_N_PHASES];
    uint64_t misses[S2MOE_N_PHASES];       /* lookups for which the GPU waited while the expert was fetched */
    uint64_t prefetched[S2MOE_N_PHASES];   /* that found it on its way; a prediction that has arrived is a hit */
    uint64_t host_misses[S2MOE_N_PHASES];  /* of the misses: those that the host's memory had not got either */
    uint64_t promotions;                   /* experts copied beside its computation */
    uint64_t demand_bytes[S2MOE_N_PHASES]; /* copied while the GPU waited */
    uint64_t promoted_bytes;               /* copied beside its computation */
    uint64_t requests[S2MOE_N_PHASES];     /* layers for which it waited for the host */
    double wait_seconds[S2MOE_N_PHASES];   /* for how long */
    double copy_seconds[S2MOE_N_PHASES];   /* that the GPU took to copy demand_bytes, without the last layer's */
    /* times the host waited for the GPU: in ggml, whose inputs and results cross the bus, for the tables, and for the
     * gate; those between two decodes count with the second one */
    uint64_t synchronizations[S2MOE_N_PHASES];
    uint64_t evictions;
    uint64_t resident_experts; /* gauge */
    uint64_t resident_bytes;   /* gauge */
    uint64_t capacity_experts; /* gauge: slots */
    uint64_t capacity_bytes;   /* gauge */
    uint64_t pinned_bytes;     /* gauge: of the host's cache, what the GPU reads where it is */
};

/* Zeros without a device. [any thread] */
S2MOE_API void s2moe_experts_device_stats(const s2moe_experts * experts, struct s2moe_device_stats * stats);

/* [any thread] */
S2MOE_API void s2moe_experts_stats(const s2moe_experts * experts, struct s2moe_expert_stats * stats);

/* Residency of an expert. */
enum s2moe_residency { S2MOE_ABSENT = 0, S2MOE_IN_FLIGHT = 1, S2MOE_RESIDENT = 2 };

/*
 * Fills mask[n_expert] with the residency of each expert of a layer. What it says holds until the next decode or
 * prefetch, or until a read lands.
 * Errors: S2MOE_ERROR_INVALID: the layer has no experts in the store, or n_expert is not its number of experts.
 * [any thread]
 */
S2MOE_API int32_t s2moe_experts_residency(const s2moe_experts * experts,
                                          int32_t layer,
                                          uint8_t * mask,
                                          int32_t n_expert);

struct s2moe_expert_id {
    int32_t layer; /* of the model, counted from 0 */
    int32_t expert;
};

/* Order of reads: demand goes first, then prefetches, then warm-up. */
enum s2moe_priority { S2MOE_PRIORITY_PREFETCH = 1, S2MOE_PRIORITY_WARMUP = 2 };

/*
 * Asks for experts to be read ahead, the most urgent first. Those that are resident or on their way already count as
 * done; a prefetch of what is queued as a warm-up makes it a prefetch. Returns at once. A prefetch evicts, in its
 * class, only what is neither pinned nor needed by a running decode; a warm-up only takes slots that are empty. A
 * prefetched expert that is not used is kept for two decodes as if it were pinned.
 *
 *   ids       [n_ids]
 *   n_queued  if not NULL: how many have a slot now; a shortage of slots is no error
 *
 * Errors: S2MOE_ERROR_INVALID: an id out of range (nothing is queued then). [any thread]
 */
S2MOE_API int32_t s2moe_experts_prefetch(s2moe_experts * experts,
                                         const struct s2moe_expert_id * ids,
                                         int32_t n_ids,
                                         enum s2moe_priority priority,
                                         int32_t * n_queued);

/* Drops prefetches and warm-ups whose reads have not begun. Returns how many experts that were. [any thread] */
S2MOE_API int32_t s2moe_experts_cancel_prefetches(s2moe_experts * experts);

/*
 * Replaces the set of pinned experts: those of it that are resident or on their way are not evicted until the set is
 * replaced again, unless a layer could not be computed otherwise.
 * Errors: S2MOE_ERROR_INVALID as in s2moe_experts_prefetch(). [any thread]
 */
S2MOE_API int32_t s2moe_experts_pin(s2moe_experts * experts, const struct s2moe_expert_id * ids, int32_t n_ids);

/* Live estimates: moving averages over recent decodes and reads. */
struct s2moe_expert_costs {
    double hit_seconds;      /* computing one resident expert for one token */
    double miss_seconds;     /* reading one expert with nothing else to do meanwhile */
    double bytes_per_second; /* of the drive while reads are in flight; 0 before the first read */
    double queued_seconds;   /* until the reads that are queued now have landed */
};

/* [any thread] */
S2MOE_API void s2moe_experts_costs(const s2moe_experts * experts, struct s2moe_expert_costs * costs);

/*
 * How many tokens of decodes (not of prefill) used each expert since s2moe_experts_open().
 *
 *   counts  [number of layers in the layout][n_expert of the largest layer], in the layout's order of layers
 *   n       its length; S2MOE_ERROR_INVALID if it is not that product
 */
S2MOE_API int32_t s2moe_experts_counts(const s2moe_experts * experts, uint64_t * counts, int64_t n);

/*
 * Tells the cache how useful experts were in earlier runs, and fills empty slots with the most useful ones in the
 * background.
 *
 *   counts  laid out as in s2moe_experts_counts(); only ratios within a layer matter
 *
 * With the policy "static" the first call since s2moe_experts_allocate() decides what stays; later ones add to it only
 * what there is room for.
 * Errors: S2MOE_ERROR_INVALID as there. Returns at once. [any thread]
 */
S2MOE_API int32_t s2moe_experts_warm(s2moe_experts * experts, const uint64_t * counts, int64_t n);

/* One layer of one decode, as it went. */
struct s2moe_expert_trace {
    int64_t begin_ns; /* CLOCK_MONOTONIC when the layer's experts were known */
    int32_t layer;
    int32_t n_tokens;
    int32_t n_hits; /* lookups that read nothing: hits and prefetched ones */
    int32_t n_misses;
    uint64_t missed_bytes; /* matrices read on demand for it */
    double stall_seconds;  /* as in s2moe_expert_stats */
    double compute_seconds;
};

/* Starts (n_max > 0) or stops (0) keeping the last n_max records. */
S2MOE_API int32_t s2moe_experts_set_trace(s2moe_experts * experts, int64_t n_max);

/* Moves up to n_max kept records, oldest first, to `records`; returns how many. Not during a decode. */
S2MOE_API int64_t s2moe_experts_take_trace(s2moe_experts * experts, struct s2moe_expert_trace * records, int64_t n_max);

/*
 * Measures the drive: reads n_bytes of experts at random, as the cache would, and throws them away.
 * Receives bytes per second. Errors: S2MOE_ERROR_IO.
 */
S2MOE_API int32_t s2moe_experts_measure(s2moe_experts * experts, uint64_t n_bytes, double * bytes_per_second);

/* Memory that a context and its model take, by purpose; exact also for a model loaded with no_alloc. */
struct s2moe_memory {
    uint64_t weights_bytes;     /* in the host's memory, without what an expert store keeps on the drive */
    uint64_t kv_bytes;          /* KV cache or recurrent state */
    uint64_t compute_bytes;     /* buffers of intermediate results */
    uint64_t gpu_weights_bytes; /* the same in the memory of GPUs */
    uint64_t gpu_kv_bytes;
    uint64_t gpu_compute_bytes;
};

S2MOE_API int32_t s2moe_context_memory(const struct llama_context * ctx, struct s2moe_memory * memory);

/*
 * Memory of the GPU that llama.cpp counts as number `index`, from 0, as its driver tells: what is free now and all.
 * Errors: S2MOE_ERROR_UNSUPPORTED when there is no such GPU.
 */
S2MOE_API int32_t s2moe_gpu_memory(int32_t index, uint64_t * free_bytes, uint64_t * total_bytes);

/* ── decoding ──────────────────────────────────────────────────────────────────────────────────────────── */

/*
 * Evaluates tokens and appends them to the KV cache of sequence 0.
 *
 *   tokens      [n_tokens], 1 <= n_tokens <= the context's n_ubatch: one micro-batch, so that it is all or nothing
 *   position    of tokens[0]; the cache must hold exactly the positions 0 .. position-1 of sequence 0
 *   all_logits  false: only the last token's logits are computed (index -1 or n_tokens-1 in llama_get_logits_ith)
 *
 * On any error the cache holds what it held before; a recurrent state, which cannot be rolled back, must then be
 * cleared by the caller. Errors: S2MOE_ERROR_INVALID, S2MOE_ERROR_ABORTED, S2MOE_ERROR_CONTEXT_FULL,
 * S2MOE_ERROR_NO_MEMORY, S2MOE_ERROR_IO (with an expert store), S2MOE_ERROR_NUMERIC, S2MOE_ERROR_INTERNAL.
 */
S2MOE_API int32_t
s2moe_decode(struct llama_context * ctx, const int32_t * tokens, int32_t n_tokens, int32_t position, bool all_logits);

/* A switch that ends a running decode of one context, or the work of its sampler on a grammar. */
typedef struct s2moe_abort s2moe_abort;

/* Installs a switch as ctx's abort callback, replacing any other. Free it after the context. */
S2MOE_API s2moe_abort * s2moe_abort_create(struct llama_context * ctx);
S2MOE_API void s2moe_abort_free(s2moe_abort * abort);

/* Makes the running decode, or else the next, return S2MOE_ERROR_ABORTED; on the CPU within one graph node, which
 * is well below a millisecond for one token. The same goes for creating and sampling with a grammar, as a rule within
 * 20 ms. Stays set until cleared. [any thread] */
S2MOE_API void s2moe_abort_request(s2moe_abort * abort);

/* Lets decodes and samplers run again. [any thread] */
S2MOE_API void s2moe_abort_clear(s2moe_abort * abort);

/* ── sampling ──────────────────────────────────────────────────────────────────────────────────────────── */

/* llama.cpp's sampler chain with grammar, penalties and the state of one answer. */
typedef struct s2moe_sampler s2moe_sampler;

/*
 * Creates the sampler of one answer.
 *
 *   params_json  a JSON object; every key is optional. An absent key takes the model's recommendation (GGUF
 *                general.sampling.*), else llama.cpp's default:
 *                  "temperature"        float >= 0; 0 = the most probable token
 *                  "top_p"              0 <= float <= 1; 1 = off, 0 = the most probable token
 *                  "top_k"              int >= 0; 0 = off
 *                  "min_p"              0 <= float <= 1; 0 = off
 *                  "seed"               0 <= int < 2^32; absent = random
 *                  "presence_penalty", "frequency_penalty"    float
 *                  "repeat_penalty"     float > 0; 1 = off
 *                  "repeat_last_n"      int >= 0: tokens that the penalties look back
 *                  "logit_bias"         array of [token, bias]
 *                  "grammar"            GBNF text, at most 64 KiB, groups nested at most 200 deep
 *                  "grammar_lazy", "grammar_triggers", "preserved_tokens", "generation_prompt"
 *                                       as s2moe_chat_apply() returned them, to go with its grammar only. The
 *                                       grammar may then have 2 MiB
 *                  "thinking"           as s2moe_chat_apply() returned it, to go with any grammar for an answer in a
 *                                       chat: the grammar does not concern reasoning
 *   abort        ends this call and s2moe_sampler_sample() while they are at work on a grammar, which may take a second
 *                or two; must outlive the sampler. NULL: nothing does
 *
 * Errors (NULL): last_status, if not NULL, receives S2MOE_ERROR_INVALID (the message names the key),
 * S2MOE_ERROR_GRAMMAR (the message names line and column, or the rule; since it quotes names of rules, it is for the
 * client and not for a log) or S2MOE_ERROR_ABORTED.
 */
S2MOE_API s2moe_sampler * s2moe_sampler_create(const struct llama_model * model,
                                               const char * params_json,
                                               s2moe_abort * abort,
                                               int32_t * last_status);
S2MOE_API void s2moe_sampler_free(s2moe_sampler * sampler);

/*
 * Chooses the next token from the logits at `index` of ctx's last decode (as in llama_get_logits_ith) and adds
 * it to the sampler's history and grammar state. Stores it in *token.
 * Errors: S2MOE_ERROR_INVALID for an index without logits, S2MOE_ERROR_GRAMMAR where the grammar is too ambiguous to be
 * followed within a second or two, S2MOE_ERROR_ABORTED (the sampler can then only be freed), S2MOE_ERROR_INTERNAL (also
 * where the grammar allows no token of the vocabulary).
 */
S2MOE_API int32_t s2moe_sampler_sample(s2moe_sampler * sampler,
                                       struct llama_context * ctx,
                                       int32_t index,
                                       int32_t * token);

/*
 * Adds prompt tokens to the history that the penalties look at; the grammar ignores them.
 *   tokens  [n_tokens]
 */
S2MOE_API int32_t s2moe_sampler_accept_prompt(s2moe_sampler * sampler, const int32_t * tokens, int32_t n_tokens);

/*
 * Log probabilities (natural logarithm) under the softmax of the logits at `index` of ctx's last decode, over the whole
 * vocabulary: what the model itself thinks, before penalties, grammar and temperature.
 *
 *   token         whose log probability *logprob receives
 *   n_top         0 .. 100
 *   top_tokens    receives the n_top likeliest tokens, best first; of equal ones the smaller id
 *   top_logprobs  and their log probabilities; all are at least -9999
 *
 * Errors: S2MOE_ERROR_INVALID (an index without logits, a token outside the vocabulary), S2MOE_ERROR_NUMERIC.
 */
S2MOE_API int32_t s2moe_logprobs(struct llama_context * ctx,
                                 int32_t index,
                                 int32_t token,
                                 float * logprob,
                                 int32_t n_top,
                                 int32_t * top_tokens,
                                 float * top_logprobs);

/* The seed in use. */
S2MOE_API uint32_t s2moe_sampler_seed(const s2moe_sampler * sampler);

/* ── speculative decoding ──────────────────────────────────────────────────────────────────────────────── */

/*
 * S²-MoE: the model drafts for itself with fewer experts on its own KV cache, and verifies the drafts in one batch.
 *
 * A speculator belongs to one context, whose sequences 0 .. n_seq_max-1 are its own: create the context with
 * kv_unified and n_seq_max = S2MOE_N_DRAFT_SEQUENCES (1 is enough for a model that cannot be drafted for, see
 * s2moe_speculator_limits()). Sequence 0 holds the conversation. Between two calls the KV cache holds exactly the
 * committed tokens.
 *
 *   s2moe_speculator * speculator = s2moe_speculator_create(ctx, NULL, state_json, &status);
 *   prefill with s2moe_decode(); sample the first token
 *   s2moe_speculator_begin(speculator, options_json);
 *   while the answer is not complete:
 *       s2moe_speculator_step(speculator, sampler, token, position, n_max, tokens, &n);
 *       position += n; token = tokens[n - 1];
 *   s2moe_speculator_report(speculator, &report_json);
 *
 * Threads: as the context. No function here may run beside a decode of the context.
 */
typedef struct s2moe_speculator s2moe_speculator;

#define S2MOE_N_DRAFT_SEQUENCES 8 /* leaves of a tree of drafts */
#define S2MOE_N_VERIFY_ROWS 8     /* the root and its drafts: widths that every CPU kernel computes as a single row */

/*
 * Makes CPU kernels compute each row of a batch of up to n_rows rows exactly as they compute it alone; 0 (the
 * default) leaves llama.cpp's choice. Concerns the whole process; call it before the first context is created.
 * [any thread]
 */
S2MOE_API void s2moe_set_batch_invariance(int32_t n_rows);

/* What can be drafted for a model, as JSON: { "method": "s2moe" or "off", "width": true where several drafts may
 * follow one token, "reason": why not more, "" if all }. Works for models loaded with no_alloc. [any thread] */
S2MOE_API int32_t s2moe_speculator_limits(const struct llama_model * model, char ** limits_json);

/* Settings of the gate, as keys of s2moe_speculator_begin(). */
struct s2moe_gate_settings {
    double error_budget;
    double reuse_strength;
    double residency_weight;
    int32_t reuse_cap;
    bool single_token_bias;
};

/*
 * The gate's rule for one layer: which experts the rows of a verification use. It is what the speculator applies, for
 * tests and for other backends to compare with; native/src/speculation/gate.h states it.
 *
 *   kind        bits: 1 scores are probabilities, and their logarithms are compared; 2 weights are logits
 *   scores      [n_rows][n_expert] the router's selection scores, -INFINITY: may not be chosen
 *   weights     [n_rows][n_expert] what the mixing weights are taken from
 *   residency   [n_expert] enum s2moe_residency
 *   prefixes    [n_rows] probability that the row is accepted; 1 for the root
 *   allowances  [n_rows] displaced weight that the row may spend in this layer
 *   exact       receives [n_rows][k] the router's choice, best first; -1 where fewer than k may be chosen
 *
 *   chosen      receives [n_rows][k] the gate's choice, likewise
 *
 *   displaced   receives [n_rows] the share of the chosen experts' mixing weights that is not on exact ones
 */
S2MOE_API int32_t s2moe_gate_select(const struct s2moe_gate_settings * settings,
                                    int32_t n_rows,
                                    int32_t n_expert,
                                    int32_t k,
                                    int32_t kind,
                                    const float * scores,
                                    const float * weights,
                                    const uint8_t * residency,
                                    const double * prefixes,
                                    const double * allowances,
                                    int32_t * exact,
                                    int32_t * chosen,
                                    double * displaced);

/*
 *   ctx          with one sequence only, drafts are chains
 *   draft_ctx    a second context of the same model for drafts that do not share the KV cache, created like
 *                ctx; NULL: such drafts are refused by s2moe_speculator_begin(). The speculator does not own
 *                it; it must outlive the speculator.
 *   state_json   what s2moe_speculator_state() returned in an earlier run of the same model, hardware and budget;
 *                NULL or text of another version: costs and confidences are learnt from the first drafts on
 *   last_status  if not NULL: S2MOE_OK or the error. A context with too few sequences is none: then drafts are chains
 *
 * Returns NULL after an error: S2MOE_ERROR_NO_MEMORY, S2MOE_ERROR_INTERNAL.
 */
S2MOE_API s2moe_speculator * s2moe_speculator_create(struct llama_context * ctx,
                                                     struct llama_context * draft_ctx,
                                                     const char * state_json,
                                                     int32_t * last_status);
S2MOE_API void s2moe_speculator_free(s2moe_speculator * speculator);

/*
 * Begins an answer: counters of the response and its error budget start at zero.
 *
 *   options_json  every key is optional, an unknown one is an error:
 *     "method"            "s2moe" (default), "expert-skip", "cascade", or "off": one token per step
 *     "preset"            "exact", "balanced" (default), "fast": values for the five keys below it
 *     "error_budget"      0 <= float <= 1: displaced mixing weight per token and layer
 *     "reuse_strength"    0 <= float <= 10: of the bias towards experts in use; 0 = none
 *     "residency_weight"  0 <= float <= 10: the share mu of residency in what counts as in use
 *     "single_token_bias" bool: bias single-token decodes and the root, too, towards resident experts
 *     "reuse_cap"         0 or k <= int: experts of a layer that count as in use; 0 = 2 k
 *     "exact"             bool: true = the preset "exact" whatever else is said
 *     "draft_experts"     0 <= int <= k; 0 = max(1, k / 4)
 *     "max_nodes"         1 <= int < S2MOE_N_VERIFY_ROWS: drafts per step; absent: S2MOE_N_VERIFY_ROWS - 1, for
 *                         "expert-skip" twice that, since its tree has two chains
 *     "adaptive"          bool: false = a fixed tree of depth 4 and width 2 at the first level, and no pauses
 *     "reuse_gating"      bool: false = error_budget 0
 *     "shared_context"    bool: false = drafts have a KV cache of their own
 *     "prefetch"          bool: false = predicted experts are not read ahead
 *
 * Errors: S2MOE_ERROR_INVALID (the message begins with the key), S2MOE_ERROR_UNSUPPORTED (the model cannot be drafted
 * for and "method" is not "off", or there is no draft context).
 */
S2MOE_API int32_t s2moe_speculator_begin(s2moe_speculator * speculator, const char * options_json);

/* Tells which tokens the KV cache holds, [n_tokens] from position 0 on: after begin(), and only needed where drafts
 * have a context of their own ("method" "expert-skip", or "shared_context" false), which then evaluates them too. */
S2MOE_API int32_t s2moe_speculator_feed(s2moe_speculator * speculator, const int32_t * tokens, int32_t n_tokens);

/*
 * One step: drafts, if that pays, evaluates `root` and the drafts with all experts, and chooses the next tokens.
 *
 *   sampler    chooses them, in order
 *   root       the last token, not yet in the KV cache, at `position`; the cache holds 0 .. position-1 of sequence 0
 *   n_max      tokens wanted at most, >= 1: near the end of an answer drafts shrink
 *   tokens     receives *n_tokens tokens, 1 <= *n_tokens <= min(n_max, S2MOE_N_VERIFY_ROWS): accepted drafts, then one
 *              that is not evaluated yet, the root of the next step. Ends early after a token that ends generation.
 *
 * The KV cache then holds positions 0 .. position + *n_tokens - 1: root and accepted drafts. On error it holds what it
 * held before, and the sampler has accepted nothing. A failure inside drafting is no error: the response goes on
 * without drafts, and its report says so. Errors: as s2moe_decode(), and S2MOE_ERROR_INVALID before begin().
 */
S2MOE_API int32_t s2moe_speculator_step(s2moe_speculator * speculator,
                                        s2moe_sampler * sampler,
                                        int32_t root,
                                        int32_t position,
                                        int32_t n_max,
                                        int32_t * tokens,
                                        int32_t * n_tokens);

/* The same along a given text: text[i] is the token at position + 1 + i, and is chosen whatever the logits say.
 * 1 <= n_text. Tells what drafting and gating do along exact text. */
S2MOE_API int32_t s2moe_speculator_follow(s2moe_speculator * speculator,
                                          int32_t root,
                                          int32_t position,
                                          const int32_t * text,
                                          int32_t n_text,
                                          int32_t * n_tokens);

struct s2moe_committed_row {
    int32_t logits_index; /* of llama_get_logits_ith() until the next decode */
    int32_t depth;        /* 0: the root */
    int32_t n_biased;     /* layers whose choice of experts was changed by gating */
};

/* The rows that the last step committed: root first, *n_tokens of them. Owned by the speculator until its next step. */
S2MOE_API int32_t s2moe_speculator_rows(const s2moe_speculator * speculator,
                                        const struct s2moe_committed_row ** rows,
                                        int32_t * n_rows);

/* What the response has done so far, as a JSON object; docs/speculation.md explains each key. Works at any time after
 * begin(). */
S2MOE_API int32_t s2moe_speculator_report(const s2moe_speculator * speculator, char ** report_json);

/* What was learnt about costs and confidences, as JSON to keep for the next run. */
S2MOE_API int32_t s2moe_speculator_state(const s2moe_speculator * speculator, char ** state_json);

/* ── chat templates and answers ────────────────────────────────────────────────────────────────────────── */

/* The chat template of a model, run by llama.cpp's own Jinja interpreter, which can reach no file, process or
 * network. */
typedef struct s2moe_chat s2moe_chat;

/*
 *   template_override  Jinja source instead of the model's own template; NULL or "" = the model's own, or
 *                      ChatML for a model without one
 *
 * Errors (NULL): the template does not parse. The object keeps no reference to the model.
 */
S2MOE_API s2moe_chat * s2moe_chat_create(const struct llama_model * model, const char * template_override);
S2MOE_API void s2moe_chat_free(s2moe_chat * chat);

/*
 * Renders a conversation.
 *
 *   request_json  { "messages": [ OpenAI chat messages ], "add_generation_prompt": bool (default true),
 *                   "enable_thinking": bool (default true),
 *                   "tools": [ OpenAI tools ], "tool_choice": "auto" (default), "none" or "required",
 *                   "parallel_tool_calls": bool (default false: at most one call),
 *                   "json_schema": object that the answer's content must match; not with "required". With tools the
 *                   answer is a call or such content,
 *                   "chat_template_kwargs": { name: any JSON } variables of the template; they win over
 *                   "enable_thinking",
 *                   "continue_final_message": bool (default false): the last message is the assistant's and is
 *                   continued; what it has is not part of the answer }
 *   result_json   receives { "prompt": text to tokenize with special tokens parsed; a BOS that the vocabulary adds by
 *                   itself is not in it, so let the tokenizer add it,
 *                   "format": how the answer is written; "content-only" needs no parser,
 *                   "stops": [ texts that end the answer beside the request's own ],
 *                   "grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens",
 *                   "generation_prompt": what of the answer the prompt already holds if the grammar begins with it,
 *                   else null,
 *                   "thinking": how the template marks reasoning, null if it does not,
 *                   "unenforced": [ keywords of schemas, with their places, that no grammar can hold: the answer may
 *                   break them ]
 *                   and more for s2moe_answer_create(), which wants the whole object }
 *
 * "grammar" is what tools and schema demand; hand it with the keys beside it to s2moe_sampler_create(). It leaves
 * reasoning free where the template knows of reasoning.
 *
 * A template without a format for calls, or that does not describe tools, gets both from here: tools always work.
 *
 * Schemas. A keyword that takes part in choosing what is valid, and that cannot be kept (a pattern that is no grammar,
 * not, if, patternProperties, …), is an error in "json_schema" and in a function with "strict": true; in another
 * function it is left out. One that limits values and cannot be kept (bounds of numbers that are no integers,
 * multipleOf, uniqueItems, minProperties, maxProperties, a oneOf that may overlap, counts beyond 2000 characters or 500
 * items) is an error in a function with "strict": true, and else left out, as unknown formats are everywhere.
 * docs/api.md has the whole list. What is left out is in "unenforced". At most 48 levels of schemas, 10,000 of them in
 * one, 200 optional properties of one object, 512 tools.
 *
 * Errors: S2MOE_ERROR_INVALID (malformed JSON, messages, or tools: the message begins with the place),
 * S2MOE_ERROR_GRAMMAR (a schema cannot be turned into a grammar: the message begins with the place),
 * S2MOE_ERROR_TEMPLATE (the template refuses the messages), S2MOE_ERROR_UNSUPPORTED (the template has no way to do
 * this). [any thread]
 */
S2MOE_API int32_t s2moe_chat_apply(const s2moe_chat * chat, const char * request_json, char ** result_json);

/* Jinja source of the template in use. Freed with s2moe_string_free(). [any thread] */
S2MOE_API int32_t s2moe_chat_source(const s2moe_chat * chat, char ** source);

/* The parser of one streamed answer: splits raw text into content, reasoning and tool calls. */
typedef struct s2moe_answer s2moe_answer;

/* `chat_json`: what s2moe_chat_apply() returned. Errors: NULL. */
S2MOE_API s2moe_answer * s2moe_answer_create(const char * chat_json);
S2MOE_API void s2moe_answer_free(s2moe_answer * answer);

/*
 * Adds text to the answer and returns what became certain.
 *
 *   text, n_bytes  more of the answer, whole UTF-8 characters
 *   final          true: the answer ends here
 *   delta_json     receives { "content": text, "reasoning": text, "tool_calls": [{ "index": from 0, "id", "name",
 *                  "arguments": a piece of JSON text }] }; any may be empty. "name", and "id" where the format has
 *                  one, come once, with the first piece of a call; indices never go back
 *
 * Text that may still turn out to be markup is held back until it is decided. At the end, one character of it
 * counts as text, more is the beginning of a tag and is dropped. An answer that does not fit its template is content
 * from there on, up to the first tag of calls behind it; tags of reasoning inside content are taken out; behind a call
 * nothing is content. The arguments of a call that is cut off are as they were written. What is returned does not
 * depend on how the text was cut into pieces.
 * Errors: S2MOE_ERROR_INTERNAL.
 */
S2MOE_API int32_t
s2moe_answer_feed(s2moe_answer * answer, const char * text, size_t n_bytes, bool final, char ** delta_json);

#ifdef __cplusplus
}
#endif

#endif /* S2MOE_H */

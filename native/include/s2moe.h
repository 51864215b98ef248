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
#define S2MOE_ABI_VERSION 1

enum s2moe_status {
    S2MOE_OK = 0,
    S2MOE_ERROR_INVALID = -1,      /* an argument, or a value in a JSON argument, is out of its domain */
    S2MOE_ERROR_TEMPLATE = -2,     /* the chat template rejects these messages or cannot be parsed */
    S2MOE_ERROR_GRAMMAR = -3,      /* the grammar does not parse or names no root */
    S2MOE_ERROR_ABORTED = -4,      /* s2moe_abort_request() took effect */
    S2MOE_ERROR_CONTEXT_FULL = -5, /* no room in the KV cache */
    S2MOE_ERROR_NO_MEMORY = -6,    /* an allocation failed */
    S2MOE_ERROR_UNSUPPORTED = -7,  /* the model has no experts, or the backend cannot do this */
    S2MOE_ERROR_INTERNAL = -8      /* llama.cpp failed for a reason that it logged */
};

/* ── the library ───────────────────────────────────────────────────────────────────────────────────────── */

/* S2MOE_ABI_VERSION of the library as built. [any thread] */
S2MOE_API int32_t s2moe_abi_version(void);

/*
 * What was built, as a JSON object: "version" (of s2moe), "source" (release of llama-cpp-python, llama.cpp's
 * commit, patch revision), "cuda" (bool), "system" (llama.cpp's line about CPU features). The string lives as
 * long as the library. [any thread]
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

/* ── decoding ──────────────────────────────────────────────────────────────────────────────────────────── */

/*
 * Evaluates tokens and appends them to the KV cache of sequence 0.
 *
 *   tokens      [n_tokens], 1 <= n_tokens <= the context's n_ubatch: one micro-batch, so that it is all or nothing
 *   position    of tokens[0]; the cache must hold exactly the positions 0 .. position-1 of sequence 0
 *   all_logits  false: only the last token's logits are computed (index -1 or n_tokens-1 in llama_get_logits_ith)
 *
 * On any error the cache holds what it held before; a recurrent state, which cannot be rolled back, must then be
 * cleared by the caller. Errors: S2MOE_ERROR_INVALID, S2MOE_ERROR_ABORTED,
 * S2MOE_ERROR_CONTEXT_FULL, S2MOE_ERROR_NO_MEMORY, S2MOE_ERROR_INTERNAL.
 */
S2MOE_API int32_t
s2moe_decode(struct llama_context * ctx, const int32_t * tokens, int32_t n_tokens, int32_t position, bool all_logits);

/* A switch that ends a running decode of one context. */
typedef struct s2moe_abort s2moe_abort;

/* Installs a switch as ctx's abort callback, replacing any other. Free it after the context. */
S2MOE_API s2moe_abort * s2moe_abort_create(struct llama_context * ctx);
S2MOE_API void s2moe_abort_free(s2moe_abort * abort);

/* Makes the running decode, or else the next, return S2MOE_ERROR_ABORTED; on the CPU within one graph node, which
 * is well below a millisecond for one token. Stays set until cleared. [any thread] */
S2MOE_API void s2moe_abort_request(s2moe_abort * abort);

/* Lets decodes run again. [any thread] */
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
 *                                       as s2moe_chat_apply() returned them, to go with its grammar
 *
 * Errors (NULL): last_status, if not NULL, receives S2MOE_ERROR_INVALID (the message names the key) or
 * S2MOE_ERROR_GRAMMAR.
 */
S2MOE_API s2moe_sampler *
s2moe_sampler_create(const struct llama_model * model, const char * params_json, int32_t * last_status);
S2MOE_API void s2moe_sampler_free(s2moe_sampler * sampler);

/*
 * Chooses the next token from the logits at `index` of ctx's last decode (as in llama_get_logits_ith) and adds
 * it to the sampler's history and grammar state. Stores it in *token.
 * Errors: S2MOE_ERROR_INVALID for an index without logits, S2MOE_ERROR_INTERNAL.
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

/* The seed in use. */
S2MOE_API uint32_t s2moe_sampler_seed(const s2moe_sampler * sampler);

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
 *                   "enable_thinking": bool (default true) }
 *   result_json   receives { "prompt": text to tokenize with special tokens parsed; a BOS that the vocabulary adds by
                             itself is not in it, so let the tokenizer add it,
 *                   "format": how the answer is written; "content-only" needs no parser,
 *                   "stops": [ texts that end the answer beside the request's own ],
 *                   "grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens",
 *                   "generation_prompt": what of the answer the prompt already holds,
 *                   "parser": opaque; hand the whole object to s2moe_answer_create() }
 *
 * Errors: S2MOE_ERROR_INVALID (malformed JSON or messages), S2MOE_ERROR_TEMPLATE (the template refuses them).
 */
S2MOE_API int32_t s2moe_chat_apply(const s2moe_chat * chat, const char * request_json, char ** result_json);

/* The parser of one streamed answer: splits raw text into content and reasoning. */
typedef struct s2moe_answer s2moe_answer;

/* `chat_json`: what s2moe_chat_apply() returned. Errors: NULL. */
S2MOE_API s2moe_answer * s2moe_answer_create(const char * chat_json);
S2MOE_API void s2moe_answer_free(s2moe_answer * answer);

/*
 * Adds text to the answer and returns what became certain.
 *
 *   text, n_bytes  more of the answer, whole UTF-8 characters
 *   final          true: the answer ends here; incomplete markup at the end then counts as content
 *   delta_json     receives { "content": text, "reasoning": text }, either may be ""
 *
 * Text that may still turn out to be markup is held back until it is decided. Errors: S2MOE_ERROR_INTERNAL.
 */
S2MOE_API int32_t
s2moe_answer_feed(s2moe_answer * answer, const char * text, size_t n_bytes, bool final, char ** delta_json);

#ifdef __cplusplus
}
#endif

#endif /* S2MOE_H */

// MoE extension of libllama: the functions that our patch adds beside llama.h.
//
// Internal to the project: libs2moe wraps these in s2moe.h, which documents errors and units. With none of
// them called, the patched library computes exactly what the unpatched one does.

#pragma once

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// Number of experts per token in the following decodes of ctx: 1 .. the model's own k; 0 restores it.
// Returns 0, or -1 when n_expert_used is out of that range or the model has no experts.
LLAMA_API int32_t llama_moe_set_n_expert_used(struct llama_context * ctx, int32_t n_expert_used);

// The value in force: what was set, or the model's own k.
LLAMA_API int32_t llama_moe_get_n_expert_used(const struct llama_context * ctx);

// Record the router's k best expert ids (k: the model's own, whatever is in force) per MoE layer.
LLAMA_API void llama_moe_set_record(struct llama_context * ctx, bool record);

// Ids recorded by the last decode, [n_layer][n_tokens][k]; waits for the computation to finish.
// NULL when nothing was recorded. Valid until the next call that takes this context.
LLAMA_API const int32_t *
llama_moe_get_recorded(struct llama_context * ctx, int32_t * n_layer, int32_t * n_tokens, int32_t * k);

// Makes llama_moe_get_recorded return NULL until the next decode.
LLAMA_API void llama_moe_forget_recorded(struct llama_context * ctx);

// Times a decode of ctx reused the previous graph instead of building one, since the context was created.
LLAMA_API int32_t llama_moe_get_n_graph_reuses(const struct llama_context * ctx);

LLAMA_API int32_t llama_moe_model_n_expert(const struct llama_model * model);      // 0: dense model
LLAMA_API int32_t llama_moe_model_n_expert_used(const struct llama_model * model); // largest of all layers
LLAMA_API int32_t llama_moe_model_n_moe_layer(const struct llama_model * model);   // layers with experts

// The down matrices of the first layer with experts; NULL for a dense model.
LLAMA_API const struct ggml_tensor * llama_moe_model_expert_tensor(const struct llama_model * model);

#ifdef __cplusplus
}
#endif

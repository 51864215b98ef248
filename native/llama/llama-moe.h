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

// What a gate needs to know of a layer.
struct llama_moe_gate_layer {
    void * owner;   // the caller's
    int32_t layer;  // of the model
    int32_t scores; // enum llama_moe_scores; this and the next are filled when the graph is built
    int32_t k;      // experts per token by the model, whatever is in force
    int32_t serial; // the same in all layers of an array, another in every array: memory may be used again
};

enum llama_moe_scores {
    LLAMA_MOE_SCORES_LOG = 1,  // scores are probabilities: their logarithms are the router's logits, but for a constant
    LLAMA_MOE_WEIGHTS_EXP = 2, // mixing weights are the softmax of the chosen values of src[1], not these themselves
};

// Puts an operation between the router's scores and the choice of the k best of them in every layer of the following
// decodes; NULL takes it out. dst and src[0] are the scores, src[1] what the mixing weights are taken from, all F32
// [n_expert, n_tokens]; userdata is &layers[layer]. Every compute thread calls it. `layers` [n_layer] must outlive the
// context.
LLAMA_API void
llama_moe_set_gate(struct llama_context * ctx, ggml_custom_op_t gate, struct llama_moe_gate_layer * layers);

// A layer whose experts are computed from slots instead of from the model's own tensors.
struct llama_moe_slot_layer {
    void * owner;  // the caller's
    int32_t index; // the caller's
    int32_t n_matrices;
    struct {
        const struct ggml_tensor * experts; // of the model
        struct ggml_tensor * slots;         // the same but for ne[2]: a matrix per slot
    } matrices[4];
};

// From the next decode on, experts of these layers are computed from their slots. `remap` puts the slots' indices in
// the place of the experts' ids, once per layer: dst and src[0] are I32 [n_expert_used, n_tokens], src[0] with strides;
// userdata is the layer. NULL takes it out. Biases and scales of experts keep the ids. `layers` [n_layers] must outlive
// the context. Throws an exception when there is no memory for the buffers that this takes.
LLAMA_API void llama_moe_set_slots(struct llama_context * ctx,
                                   ggml_custom_op_t remap,
                                   struct llama_moe_slot_layer * layers,
                                   int32_t n_layers);

// The number of the context's GPU among those of its kind, if it has exactly one; else -1.
LLAMA_API int32_t llama_moe_gpu(const struct llama_context * ctx);

// Exchanges the context's scheduler and graphs for those of a set: decodes of one shape that share a set reuse its
// graph whatever other decodes run between. Calling it again with the same set takes them out. The last decode must
// have finished.
struct llama_moe_graphs;
LLAMA_API struct llama_moe_graphs * llama_moe_graphs_create(struct llama_context * ctx);
LLAMA_API void llama_moe_graphs_free(struct llama_moe_graphs * graphs); // before its context, and not while in use
LLAMA_API void llama_moe_swap_graphs(struct llama_context * ctx, struct llama_moe_graphs * graphs);
LLAMA_API size_t llama_moe_graphs_bytes(const struct llama_moe_graphs * graphs); // compute buffers while not in use

// Whether several sequences may branch off one in this context with every row computed as in a single sequence.
LLAMA_API bool llama_moe_can_branch(struct llama_context * ctx);

// Leaves sequence 0 as all there is: its positions below `begin`, then those of sequence `seq` from begin to end - 1,
// in cells in the order of their positions.
LLAMA_API void llama_moe_kv_commit(struct llama_context * ctx, llama_seq_id seq, llama_pos begin, llama_pos end);

// Times a decode of ctx reused the previous graph instead of building one, since the context was created.
LLAMA_API int32_t llama_moe_get_n_graph_reuses(const struct llama_context * ctx);

LLAMA_API int32_t llama_moe_model_n_expert(const struct llama_model * model);      // 0: dense model
LLAMA_API int32_t llama_moe_model_n_expert_used(const struct llama_model * model); // largest of all layers
LLAMA_API int32_t llama_moe_model_n_moe_layer(const struct llama_model * model);   // layers with experts

LLAMA_API bool llama_moe_model_is_draftable(const struct llama_model * model); // has experts and a plain KV cache

// The down matrices of the first layer with experts; NULL for a dense model.
LLAMA_API const struct ggml_tensor * llama_moe_model_expert_tensor(const struct llama_model * model);

#ifdef __cplusplus
}
#endif

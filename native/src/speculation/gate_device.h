// The gate's rule on a GPU, as the gate uses it.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gate_rule.h"
#include "ggml.h"
#include "llama-moe.h"

namespace s2moe {

// What a graph knows of one layer; the matrices lie in the device's memory.
struct gate_call {
    int32_t layer = 0; // of the model
    int32_t n_rows = 0;
    int32_t n_expert = 0;
    int32_t k = 0;
    int32_t kind = 0; // enum llama_moe_scores
    gate_matrix<const float> scores;
    gate_matrix<const float> weights;
    gate_matrix<float> gated;
};

// Of the operation that llama_moe_set_gate() puts into a graph.
inline gate_call gate_call_of(const ggml_tensor * op, const llama_moe_gate_layer & layer) {
    const ggml_tensor * scores = op->src[0];
    const ggml_tensor * weights = op->src[1];
    gate_call call;
    call.layer = layer.layer;
    call.n_rows = static_cast<int32_t>(op->ne[1]);
    call.n_expert = static_cast<int32_t>(op->ne[0]);
    call.k = layer.k;
    call.kind = layer.scores;
    call.scores = {static_cast<const float *>(scores->data), scores->nb[1]};
    call.weights = {static_cast<const float *>(weights->data), weights->nb[1]};
    call.gated = {static_cast<float *>(op->data), op->nb[1]};
    return call;
}

/*
 * The layer of a call, with what a decode has of it.
 *
 *   residency      [n_layer][n_expert]
 *   exact, chosen  [n_layer][max_gate_rows][n_ids]
 */
inline gate_layer gate_layer_of(
    const gate_call & call, int n_expert, int n_ids, const uint8_t * residency, int32_t * exact, int32_t * chosen) {
    const auto ids = static_cast<ptrdiff_t>(call.layer) * max_gate_rows * n_ids;
    gate_layer layer;
    layer.n_rows = call.n_rows;
    layer.n_expert = call.n_expert;
    layer.k = call.k;
    layer.kind = call.kind;
    layer.n_ids = n_ids;
    layer.scores = call.scores;
    layer.weights = call.weights;
    layer.gated = call.gated;
    layer.residency = residency + static_cast<ptrdiff_t>(call.layer) * n_expert;
    layer.exact = exact + ids;
    layer.chosen = chosen + ids;
    return layer;
}

// Whether the rule's text can compute `op`; what is too large is left to the CPU.
inline bool gate_rule_fits(const ggml_tensor * op) {
    const auto fits = [](const ggml_tensor * t) {
        return t != nullptr && t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) && t->ne[2] == 1 && t->ne[3] == 1;
    };
    return fits(op) && fits(op->src[0]) && fits(op->src[1]) && op->ne[0] <= max_gate_experts &&
           op->ne[1] <= max_gate_rows;
}

// What a decode chose and spent.
struct gate_outcome {
    int32_t n_ids = 0;
    std::vector<gate_account> accounts; // [n_rows]
    std::vector<int32_t> exact;         // [n_layer][n_rows][n_ids], -1 where nothing was chosen; see gate_layer
    std::vector<int32_t> chosen;        // likewise
};

// Used by the thread that decodes. Functions throw `failure`.
class gate_device {
  public:
    virtual ~gate_device() = default;

    /*
     * Before a decode. The arguments may go when it returns.
     *
     *   residency  [n_layer][n_expert] enum s2moe_residency
     */
    virtual void begin(const gate_control & control, const uint8_t * residency) = 0;

    // Of the first n_rows rows of a decode that has been computed to its end.
    virtual gate_outcome read(int n_rows) = 0;

    // Where the CPU stands for a GPU: computes one layer, and returns true.
    virtual bool run_on_host(ggml_tensor *, const llama_moe_gate_layer &) {
        return false;
    }
};

// n_ids: the largest k of a layer, and of a draft. The CPU in the place of a GPU, for tests.
std::unique_ptr<gate_device> create_host_gate(int n_layer, int n_expert, int n_ids);

// In builds with CUDA: for one GPU.
std::unique_ptr<gate_device> create_cuda_gate(int device, int n_layer, int n_expert, int n_ids);

} // namespace s2moe

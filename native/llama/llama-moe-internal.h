// State that the patch embeds in llama.cpp's own structs, one struct per host:
//
//   llama_moe_params    in llama_cparams      what the next graph must do; part of the graph-reuse key
//   llama_moe_recorder  in llm_graph_result   the tensors of one graph that hold recorded ids
//   llama_moe_readback  in llama_context      ids of the last decode, on the host

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"
#include "llama-moe.h"

struct llama_hparams;
struct llama_ubatch;

struct llama_moe_params {
    int32_t n_expert_used = 0; // 0: the model's own
    bool record = false;
    ggml_custom_op_t gate = nullptr;              // null: the router's scores choose
    llama_moe_gate_layer * gate_layers = nullptr; // [n_layer]
    int32_t gate_serial = 0;                      // of gate_layers
    ggml_custom_op_t remap = nullptr;             // null: experts are in the model's own tensors
    llama_moe_slot_layer * slot_layers = nullptr; // [n_slot_layers]
    int32_t n_slot_layers = 0;

    bool operator==(const llama_moe_params & other) const {
        return n_expert_used == other.n_expert_used && record == other.record && gate == other.gate &&
               gate_layers == other.gate_layers && gate_serial == other.gate_serial && remap == other.remap &&
               slot_layers == other.slot_layers;
    }

    int64_t resolve(int64_t n_expert_used_model) const {
        return n_expert_used > 0 ? std::min<int64_t>(n_expert_used, n_expert_used_model) : n_expert_used_model;
    }
};

struct llama_moe_recorder {
    // I32 [k, n_tokens, n_layer]; slice j belongs to layer layers[j], its first n_rows[j] rows are written
    ggml_tensor * ids = nullptr;
    std::vector<int32_t> layers;
    std::vector<int32_t> n_rows;

    // the last ids that were mapped to slots
    const ggml_tensor * remapped_ids = nullptr;
    const llama_moe_slot_layer * remapped_layer = nullptr;
    ggml_tensor * slot_ids = nullptr;

    // Appends to gf a copy of the first k columns of `sorted` (I32 [>= k, n_rows], best expert first). The ids gather
    // on the scheduler's first backend: the GPU, where there is one, so that no layer waits for a copy.
    void add(ggml_context * ctx,
             ggml_cgraph * gf,
             ggml_backend_sched_t sched,
             const llama_hparams & hparams,
             ggml_tensor * sorted,
             int64_t k,
             int64_t n_tokens,
             int il);
};

class llama_moe_readback {
  public:
    // Forgets the decode before and prepares for n_tokens; called once per decode, before its first ubatch.
    void begin(bool record, int32_t n_layer, int32_t k, int32_t n_tokens);

    // Starts the copy of one ubatch's ids to the host.
    void append(const llama_moe_recorder & recorder, const llama_ubatch & ubatch, ggml_backend_sched_t sched);

    // [n_layer][n_tokens][k], -1 where a layer did not route a token; the copies must have finished.
    const int32_t * get();

    int32_t n_layer = 0;
    int32_t n_tokens = 0;
    int32_t k = 0;

  private:
    struct chunk {
        size_t offset; // of the ubatch's block in `raw`
        int32_t n_tokens;
        std::vector<int32_t> layers;
        std::vector<int32_t> n_rows;
        std::vector<int32_t> tokens;  // [n_tokens] index of each token in the batch
        std::vector<int32_t> outputs; // the same, of the tokens with output only
    };

    bool recording = false;
    size_t n_used = 0;
    std::vector<int32_t> raw; // sized once per decode: asynchronous copies point into it
    std::vector<int32_t> ids;
    std::vector<chunk> chunks;
};

// The scores that choose experts, after the gate: F32 like `scores`, [n_expert, n_tokens].
ggml_tensor * llama_moe_build_gate(ggml_context * ctx,
                                   const llama_moe_params & params,
                                   ggml_tensor * scores,
                                   ggml_tensor * probs,
                                   int gating, // llama_expert_gating_func_type
                                   bool scores_are_shifted,
                                   int64_t k,
                                   int il);

// ggml_mul_mat_id(), from the slots that stand in for `experts` if there are any.
ggml_tensor * llama_moe_mul_mat_id(ggml_context * ctx,
                                   const llama_moe_params & params,
                                   llama_moe_recorder & recorder,
                                   ggml_tensor * experts,
                                   ggml_tensor * cur,
                                   ggml_tensor * ids);

// Whether an expert store holds the tensor's data, so that the loader has nothing to read.
bool llama_moe_is_stored(const ggml_tensor * tensor);

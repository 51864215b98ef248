// The gate of speculation/gate.h on a GPU: its rule as a kernel, and what a decode needs of it in device memory.
//
// A decode is begin(), launch() per layer in the order of the layers, and one read(), all on one stream. Only read()
// waits. launch() depends on nothing that changes between decodes, so it may be recorded into a CUDA graph.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gate_rule.h"
#include "ggml.h"

struct CUstream_st; // cudaStream_t points to it
struct CUevent_st;

namespace s2moe {

// What a graph knows of one layer; the matrices lie in device memory.
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
gate_call gate_call_of(const ggml_tensor * op, const llama_moe_gate_layer & layer);

// What a decode chose and spent.
struct gate_outcome {
    int32_t n_ids = 0;
    std::vector<gate_account> accounts; // [n_rows]
    std::vector<int32_t> exact;         // [n_layer][n_rows][n_ids], -1 where nothing was chosen; see gate_layer
    std::vector<int32_t> chosen;        // likewise
};

// Used by one thread. Functions throw `failure` with the name of the CUDA function that failed.
class device_gate {
  public:
    // Takes all the memory that it will use. n_ids: the largest k of a layer, and of a draft.
    device_gate(int device, int n_layer, int n_expert, int n_ids);
    ~device_gate();
    device_gate(const device_gate &) = delete;
    device_gate & operator=(const device_gate &) = delete;

    // Whether a kernel can compute `op`; what is too large for one is left to the CPU.
    static bool supports(const ggml_tensor * op);

    /*
     * Before a decode. The arguments may go when it returns.
     *
     *   residency  [n_layer][n_expert] enum s2moe_residency
     */
    void begin(const gate_control & control, const uint8_t * residency, CUstream_st * stream);

    // Queues one layer; what goes wrong is thrown by read().
    void launch(const gate_call & call, CUstream_st * stream) noexcept;

    // Of the first n_rows rows of the decode; waits for it.
    gate_outcome read(int n_rows, CUstream_st * stream);

  private:
    using memory = std::unique_ptr<std::byte, void (*)(std::byte *)>;
    using event = std::unique_ptr<CUevent_st, void (*)(CUevent_st *)>;

    // The first bytes on the device and of the staging memory; residency follows.
    struct state {
        gate_control control;
        gate_account accounts[max_gate_rows];
    };

    state * state_in(const memory & where) const;
    size_t ids_bytes(int n_rows) const; // of exact or of chosen

    int device;
    int n_layer;
    int n_expert;
    int n_ids;
    memory on_device; // state, residency, padding, exact [n_layer][max_gate_rows][n_ids], chosen
    memory staging;   // pinned: state, residency
    memory results;   // pinned: accounts, exact [n_layer][n_rows][n_ids], chosen
    event staged;     // the copy from `staging` is done
    int problem = 0;  // cudaError_t of the first launch that failed
};

} // namespace s2moe

// The gate of speculation/gate.h on a GPU: its rule as a kernel, and what a decode needs of it in device memory.
//
// launch() depends on nothing that changes between decodes, so it may be recorded into a CUDA graph; what changes is
// written before the decode, and read after it, on a stream of the gate's own, while no kernel of the decode runs.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "speculation/gate_device.h"

struct CUstream_st; // cudaStream_t points to it

namespace s2moe {

// Functions throw `failure` with the name of the CUDA function that failed.
class device_gate final : public gate_device {
  public:
    // Takes all the memory that it will use. n_ids: the largest k of a layer, and of a draft.
    device_gate(int device, int n_layer, int n_expert, int n_ids);
    ~device_gate() override;
    device_gate(const device_gate &) = delete;
    device_gate & operator=(const device_gate &) = delete;

    void begin(const gate_control & control, const uint8_t * residency) override;

    // Queues one layer; what goes wrong is thrown by read().
    void launch(const gate_call & call, CUstream_st * stream) noexcept;

    gate_outcome read(int n_rows) override;

  private:
    using memory = std::unique_ptr<std::byte, void (*)(std::byte *)>;
    using queue = std::unique_ptr<CUstream_st, void (*)(CUstream_st *)>;

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
    queue stream;
    int problem = 0; // cudaError_t of the first launch that failed
};

} // namespace s2moe

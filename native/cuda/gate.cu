#include "gate.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "cuda_block.h"
#include "driver.h"

namespace s2moe {

namespace {

constexpr int experts_per_lane = 4;

__global__ void __launch_bounds__(cuda_block::max_warps * cuda_block::warp_size)
    gate_kernel(const gate_control * control, gate_layer layer, gate_account * accounts) {
    __shared__ gate_memory memory;
    __shared__ cuda_lanes::exchange exchange;
    cuda_lanes lanes({}, exchange);
    gate_layer_rows(lanes, *control, layer, accounts, memory);
}

void check(cudaError_t status, const char * what) {
    check_cuda(status, std::string("gate on the GPU: ") + what);
}

std::byte * device_memory(size_t n_bytes) {
    void * result = nullptr;
    check(cudaMalloc(&result, n_bytes), "cudaMalloc");
    return static_cast<std::byte *>(result);
}

std::byte * pinned_memory(size_t n_bytes) {
    void * result = nullptr;
    check(cudaMallocHost(&result, n_bytes), "cudaMallocHost");
    return static_cast<std::byte *>(result);
}

// What fails when memory is given back has failed before, and was told then.
void free_device(std::byte * memory) {
    (void)cudaFree(memory);
}

void free_pinned(std::byte * memory) {
    (void)cudaFreeHost(memory);
}

void free_stream(CUstream_st * stream) {
    (void)cudaStreamDestroy(stream);
}

size_t aligned(size_t n_bytes) {
    return (n_bytes + 255) / 256 * 256;
}

} // namespace

device_gate::device_gate(int device, int n_layer, int n_expert, int n_ids)
    : device(device), n_layer(n_layer), n_expert(n_expert), n_ids(n_ids), on_device(nullptr, free_device),
      staging(nullptr, free_pinned), results(nullptr, free_pinned), stream(nullptr, free_stream) {
    if (n_layer < 1 || n_expert < 1 || n_expert > max_gate_experts || n_ids < 1 || n_ids > n_expert) {
        throw failure(S2MOE_ERROR_INVALID,
                      "gate on the GPU: n_expert is " + std::to_string(n_expert) + " and n_ids " +
                          std::to_string(n_ids) + "; it takes up to " + std::to_string(max_gate_experts) +
                          " experts a layer, and as many ids");
    }
    const device_scope scope(device);
    const size_t state_bytes = sizeof(state) + static_cast<size_t>(n_layer) * n_expert;
    on_device.reset(device_memory(aligned(state_bytes) + 2 * ids_bytes(max_gate_rows)));
    staging.reset(pinned_memory(state_bytes));
    results.reset(pinned_memory(aligned(sizeof(state::accounts)) + 2 * ids_bytes(max_gate_rows)));
    cudaStream_t made = nullptr;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    stream.reset(made);
}

device_gate::~device_gate() = default;

device_gate::state * device_gate::state_in(const memory & where) const {
    return reinterpret_cast<state *>(where.get());
}

size_t device_gate::ids_bytes(int n_rows) const {
    return static_cast<size_t>(n_layer) * n_rows * n_ids * sizeof(int32_t);
}

void device_gate::begin(const gate_control & control, const uint8_t * residency) {
    if (control.n_rows < 0 || control.n_rows > max_gate_rows || control.k_draft < 0 || control.k_draft > n_ids) {
        throw failure(S2MOE_ERROR_INVALID,
                      "gate on the GPU: n_rows is " + std::to_string(control.n_rows) + " and k_draft " +
                          std::to_string(control.k_draft) + "; it takes up to " + std::to_string(max_gate_rows) +
                          " rows and " + std::to_string(n_ids) + " ids");
    }
    const device_scope scope(device);
    problem = cudaSuccess;
    const size_t residency_bytes = static_cast<size_t>(n_layer) * n_expert;
    const size_t state_bytes = sizeof(state) + residency_bytes;
    *state_in(staging) = state{control, {}};
    std::memcpy(staging.get() + sizeof(state), residency, residency_bytes);
    check(cudaMemcpyAsync(on_device.get(), staging.get(), state_bytes, cudaMemcpyHostToDevice, stream.get()),
          "cudaMemcpyAsync");
    check(cudaMemsetAsync(on_device.get() + aligned(state_bytes), 0xFF, 2 * ids_bytes(max_gate_rows), stream.get()),
          "cudaMemsetAsync");
    check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
}

void device_gate::launch(const gate_call & call, CUstream_st * stream) noexcept {
    if (problem != cudaSuccess) {
        return;
    }
    if (call.layer < 0 || call.layer >= n_layer || call.n_rows < 1 || call.n_rows > max_gate_rows ||
        call.n_expert < 1 || call.n_expert > n_expert || call.k < 1 || call.k > n_ids) {
        problem = cudaErrorInvalidValue;
        return;
    }
    const size_t state_bytes = sizeof(state) + static_cast<size_t>(n_layer) * n_expert;
    auto * exact = reinterpret_cast<int32_t *>(on_device.get() + aligned(state_bytes));
    const gate_layer layer = gate_layer_of(call,
                                           n_expert,
                                           n_ids,
                                           reinterpret_cast<const uint8_t *>(on_device.get() + sizeof(state)),
                                           exact,
                                           exact + ids_bytes(max_gate_rows) / sizeof(int32_t));
    const int n_threads = block_size_for<cuda_block>((call.n_expert + experts_per_lane - 1) / experts_per_lane);
    gate_kernel<<<1, n_threads, 0, stream>>>(&state_in(on_device)->control, layer, state_in(on_device)->accounts);
    problem = cudaGetLastError();
}

gate_outcome device_gate::read(int n_rows) {
    check(static_cast<cudaError_t>(problem), "a layer's kernel");
    if (n_rows < 1 || n_rows > max_gate_rows) {
        throw failure(S2MOE_ERROR_INVALID, "gate on the GPU: n_rows is " + std::to_string(n_rows));
    }
    const device_scope scope(device);
    const size_t state_bytes = sizeof(state) + static_cast<size_t>(n_layer) * n_expert;
    std::byte * ids = results.get() + aligned(sizeof(state::accounts));
    const size_t row_bytes = n_ids * sizeof(int32_t);
    check(cudaMemcpyAsync(results.get(),
                          state_in(on_device)->accounts,
                          n_rows * sizeof(gate_account),
                          cudaMemcpyDeviceToHost,
                          stream.get()),
          "cudaMemcpyAsync");
    // exact and chosen as one matrix of 2 n_layer rows
    check(cudaMemcpy2DAsync(ids,
                            n_rows * row_bytes,
                            on_device.get() + aligned(state_bytes),
                            max_gate_rows * row_bytes,
                            n_rows * row_bytes,
                            2 * static_cast<size_t>(n_layer),
                            cudaMemcpyDeviceToHost,
                            stream.get()),
          "cudaMemcpy2DAsync");
    check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
    gate_outcome outcome;
    outcome.n_ids = n_ids;
    const auto * accounts = reinterpret_cast<const gate_account *>(results.get());
    outcome.accounts.assign(accounts, accounts + n_rows);
    const auto * exact = reinterpret_cast<const int32_t *>(ids);
    const auto n = static_cast<ptrdiff_t>(ids_bytes(n_rows) / sizeof(int32_t));
    outcome.exact.assign(exact, exact + n);
    outcome.chosen.assign(exact + n, exact + 2 * n);
    return outcome;
}

} // namespace s2moe

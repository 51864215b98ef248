// Slots on a GPU: the kernels of remap_rule.h and CUDA's side of device/memory.h.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "cuda_block.h"
#include "device/memory.h"
#include "device/tier.h"
#include "driver.h"
#include "ggml-cuda.h"
#include "remap_rule.h"
#include "s2moe-cuda-op.h"

namespace s2moe {

namespace {

// Larger pieces fail on some releases of Jetson's Linux, ggml's kernels count elements and blocks of quantized ones in
// 32 bits, and start blocks of threads for each matrix of a stack.
constexpr uint64_t piece_limit = uint64_t{1} << 30;
constexpr int fetch_threads = 256;
constexpr int fetch_blocks_per_processor = 2;

__global__ void __launch_bounds__(cuda_block::max_warps * cuda_block::warp_size)
    remap_kernel(remap_state state, remap_call call) {
    __shared__ remap_memory memory;
    __shared__ cuda_lanes::exchange exchange;
    cuda_lanes lanes({}, exchange);
    remap_layer(lanes, state, call, memory);
}

// In nanoseconds; the same clock on all of a device's processors.
__device__ unsigned long long now() {
    unsigned long long result = 0;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(result));
    return result;
}

__global__ void __launch_bounds__(fetch_threads) fetch_kernel(remap_state state) {
    if (state.control->n_fetches == 0) {
        return;
    }
    static_assert(sizeof(unsigned long long) == sizeof(state.timer->begin));
    if (threadIdx.x == 0) {
        atomicMin(reinterpret_cast<unsigned long long *>(&state.timer->begin), now());
    }
    fetch_slots(state, blockIdx.x * uint64_t{blockDim.x} + threadIdx.x, uint64_t{blockDim.x} * gridDim.x);
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicMax(reinterpret_cast<unsigned long long *>(&state.timer->end), now());
    }
}

__global__ void mark_kernel(uint32_t * word, uint32_t value) {
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

class cuda_device final : public device_memory {
  public:
    explicit cuda_device(int device);

    const char * name() const override {
        return label.c_str();
    }
    ggml_backend_buffer_type_t slot_buffer_type() const override {
        return ggml_backend_cuda_buffer_type(device);
    }
    bool is_unified() const override {
        return unified;
    }
    uint64_t piece_bytes() const override {
        return piece_limit;
    }
    bool has_watchdog() const override {
        return watched;
    }
    uint64_t n_synchronizations() const override {
        return s2moe_cuda_n_synchronizations();
    }
    memory allocate(uint64_t n_bytes) override;
    memory allocate_shared(uint64_t n_bytes) override;
    const std::byte * pin(std::span<std::byte> area, std::string * reason) override;
    void unpin(std::span<std::byte> area) noexcept override;
    void write(std::byte * to, const void * from, uint64_t n_bytes) override;
    void copy(std::byte * to, const std::byte * from, uint64_t n_bytes) override;
    uint64_t mark() override;
    bool passed(uint64_t mark) override;
    void finish_copies() noexcept override;
    std::unique_ptr<gate_device> create_gate(int n_layer, int n_expert, int n_ids) override {
        return create_cuda_gate(device, n_layer, n_expert, n_ids);
    }
    ggml_custom_op_t remap() const override {
        return on_host;
    }

  private:
    static void on_host(ggml_tensor * dst, int ith, int nth, void * userdata);
    static void on_device(ggml_tensor * dst, CUstream_st * stream, void * userdata);

    struct free_stream {
        void operator()(CUstream_st * each) const {
            (void)cudaStreamSynchronize(each);
            (void)cudaStreamDestroy(each);
        }
    };
    using stream = std::unique_ptr<CUstream_st, free_stream>;

    static stream make_stream() {
        cudaStream_t made = nullptr;
        check_cuda(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        return stream(made);
    }

    int device;
    int n_fetch_blocks = 0;
    bool unified = false;
    bool watched = false;
    std::string label;
    memory marked;  // the last mark that has been passed; kernels on `side` write it
    stream control; // for write()
    stream side;    // for copy()
    uint32_t n_marks = 0;
};

cuda_device::cuda_device(int device_in) : device(device_in) {
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess) {
        (void)cudaGetLastError();
        n_devices = 0;
    }
    if (device < 0 || device >= n_devices) {
        throw failure(S2MOE_ERROR_UNSUPPORTED,
                      "there is no cuda:" + std::to_string(device) + ", the driver shows " + std::to_string(n_devices) +
                          " devices");
    }
    const device_scope scope(device);
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    label = properties.name;
    unified = properties.integrated != 0;
    int has_limit = 0;
    check_cuda(cudaDeviceGetAttribute(&has_limit, cudaDevAttrKernelExecTimeout, device), "cudaDeviceGetAttribute");
    watched = has_limit != 0;
    n_fetch_blocks = fetch_blocks_per_processor * properties.multiProcessorCount;
    control = make_stream();
    side = make_stream();
    marked = allocate_shared(sizeof(uint32_t));
    s2moe_cuda_set_op(on_host, {[](const ggml_tensor *, void *) { return true; }, on_device});
}

// A layer that is computed on the CPU cannot have its experts in slots.
void cuda_device::on_host(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    const auto & layer = *static_cast<const llama_moe_slot_layer *>(userdata);
    auto & tier = *static_cast<device_tier *>(layer.owner);
    std::fill_n(static_cast<int32_t *>(dst->data), ggml_nelements(dst), 0);
    tier.fail("a layer with experts is computed on the CPU; with slots on a GPU all layers must be computed there");
}

void cuda_device::on_device(ggml_tensor * dst, CUstream_st * stream, void * userdata) {
    const auto & layer = *static_cast<const llama_moe_slot_layer *>(userdata);
    const auto & tier = *static_cast<const device_tier *>(layer.owner);
    const auto & self = static_cast<const cuda_device &>(tier.memory());
    const remap_call call = tier.call_of(dst, layer);
    const int n_threads = block_size_for<cuda_block>(std::max(call.n_expert, call.n_ids * call.n_tokens));
    remap_kernel<<<1, n_threads, 0, stream>>>(tier.kernel_state(), call);
    fetch_kernel<<<self.n_fetch_blocks, fetch_threads, 0, stream>>>(tier.kernel_state());
    // ggml asks for errors after each operation: what cannot be started ends the process, before anything is computed
    // from ids that nobody wrote
}

device_memory::memory cuda_device::allocate(uint64_t n_bytes) {
    const device_scope scope(device);
    void * data = nullptr;
    check_cuda(cudaMalloc(&data, n_bytes),
               "cudaMalloc of " + std::to_string(n_bytes) + " bytes for the table of slots");
    memory result(static_cast<std::byte *>(data), [](std::byte * each) { (void)cudaFree(each); });
    check_cuda(cudaMemset(data, 0, n_bytes), "cudaMemset");
    check_cuda(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize");
    return result;
}

device_memory::memory cuda_device::allocate_shared(uint64_t n_bytes) {
    const device_scope scope(device);
    void * data = nullptr;
    check_cuda(cudaHostAlloc(&data, n_bytes, cudaHostAllocPortable | cudaHostAllocMapped),
               "cudaHostAlloc of " + std::to_string(n_bytes) + " bytes");
    memory result(static_cast<std::byte *>(data), [](std::byte * each) { (void)cudaFreeHost(each); });
    void * address = nullptr;
    check_cuda(cudaHostGetDevicePointer(&address, data, 0), "cudaHostGetDevicePointer");
    if (address != data) {
        throw failure(S2MOE_ERROR_UNSUPPORTED, label + " has no addresses in common with the host");
    }
    std::memset(data, 0, n_bytes);
    return result;
}

const std::byte * cuda_device::pin(std::span<std::byte> area, std::string * reason) {
    const device_scope scope(device);
    void * address = nullptr;
    cudaError_t status = cudaHostRegister(area.data(), area.size(), cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (status == cudaSuccess) {
        status = cudaHostGetDevicePointer(&address, area.data(), 0);
        if (status != cudaSuccess) {
            (void)cudaHostUnregister(area.data());
        }
    }
    if (status != cudaSuccess) {
        (void)cudaGetLastError();
        *reason = std::string("cudaHostRegister: ") + cudaGetErrorString(status);
        return nullptr;
    }
    return static_cast<const std::byte *>(address);
}

void cuda_device::unpin(std::span<std::byte> area) noexcept {
    (void)cudaHostUnregister(area.data());
}

void cuda_device::write(std::byte * to, const void * from, uint64_t n_bytes) {
    const device_scope scope(device);
    check_cuda(cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyHostToDevice, control.get()), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(control.get()), "cudaStreamSynchronize");
}

void cuda_device::copy(std::byte * to, const std::byte * from, uint64_t n_bytes) {
    const device_scope scope(device);
    check_cuda(cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyHostToDevice, side.get()), "cudaMemcpyAsync");
}

// A kernel tells the host, so that the host need not ask the driver while another kernel waits for it.
uint64_t cuda_device::mark() {
    const device_scope scope(device);
    mark_kernel<<<1, 1, 0, side.get()>>>(reinterpret_cast<uint32_t *>(marked.get()), ++n_marks);
    check_cuda(cudaGetLastError(), "mark_kernel");
    (void)cudaStreamQuery(side.get()); // some drivers keep work back until they are asked
    return n_marks;
}

bool cuda_device::passed(uint64_t mark) {
    const std::atomic_ref<uint32_t> last(*reinterpret_cast<uint32_t *>(marked.get()));
    return last.load(std::memory_order_acquire) >= mark;
}

void cuda_device::finish_copies() noexcept {
    (void)cudaStreamSynchronize(side.get());
}

} // namespace

std::unique_ptr<device_memory> create_cuda_device(int device) {
    return std::make_unique<cuda_device>(device);
}

} // namespace s2moe

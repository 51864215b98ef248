#include "s2moe-cuda-op.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "ggml-impl.h"

namespace {

// ggml-cuda's dispatch is one function for all backends and contexts, so this is one table for all, too.
class op_table {
  public:
    void set(ggml_custom_op_t on_host, s2moe_cuda_op op) {
        const std::lock_guard lock(mutex);
        if (op.run != nullptr && op.supports != nullptr) {
            ops[on_host] = op;
        } else {
            ops.erase(on_host);
        }
    }

    s2moe_cuda_op find(ggml_custom_op_t on_host) {
        const std::lock_guard lock(mutex);
        const auto found = ops.find(on_host);
        return found == ops.end() ? s2moe_cuda_op{} : found->second;
    }

  private:
    std::mutex mutex;
    std::map<ggml_custom_op_t, s2moe_cuda_op> ops;
};

op_table & registered() {
    static op_table table;
    return table;
}

std::atomic<uint64_t> n_synchronizations = 0;

ggml_custom_op_params params_of(const ggml_tensor * op) {
    ggml_custom_op_params params;
    static_assert(sizeof(params) < sizeof(op->op_params)); // in the last word llama-moe.cpp keeps a serial
    std::memcpy(&params, op->op_params, sizeof(params));
    return params;
}

} // namespace

void s2moe_cuda_set_op(ggml_custom_op_t on_host, s2moe_cuda_op op) {
    registered().set(on_host, op);
}

size_t s2moe_cuda_max_buffer_size(ggml_backend_buffer_type_t type) {
    const ggml_backend_dev_t device = ggml_backend_buft_get_device(type);
    const bool is_integrated = device != nullptr && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_IGPU;
    return is_integrated ? size_t{1} << 30 : SIZE_MAX;
}

bool s2moe_cuda_supports_op(const ggml_tensor * op) {
    const ggml_custom_op_params params = params_of(op);
    const s2moe_cuda_op found = registered().find(params.fun);
    return found.supports != nullptr && found.supports(op, params.userdata);
}

bool s2moe_cuda_run_op(ggml_tensor * dst, CUstream_st * stream) {
    const ggml_custom_op_params params = params_of(dst);
    const s2moe_cuda_op found = registered().find(params.fun);
    if (found.run == nullptr) {
        return false;
    }
    found.run(dst, stream, params.userdata);
    return true;
}

uint64_t s2moe_cuda_n_synchronizations() {
    return n_synchronizations;
}

void s2moe_cuda_note_synchronization() {
    ++n_synchronizations;
}

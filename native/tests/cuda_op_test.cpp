// Operations of ours are the GPU's as long as they are registered, and only then.

#include <cstdint>

#include "check.h"
#include "ggml-backend-impl.h"
#include "s2moe-cuda-op.h"

namespace {

void on_host(ggml_tensor *, int, int, void *) {
}

void on_host_too(ggml_tensor *, int, int, void *) {
}

struct run_record {
    ggml_tensor * dst = nullptr;
    CUstream_st * stream = nullptr;
};

const s2moe_cuda_op recording = {
    [](const ggml_tensor * op, void * userdata) { return op->ne[0] <= 4 && userdata != nullptr; },
    [](ggml_tensor * dst, CUstream_st * stream, void * userdata) {
        *static_cast<run_record *>(userdata) = {dst, stream};
    },
};

// A GPU that is nothing but its type.
struct fake_gpu {
    explicit fake_gpu(enum ggml_backend_dev_type kind) : kind(kind) {
        device.iface.get_type = [](ggml_backend_dev_t each) { return static_cast<fake_gpu *>(each->context)->kind; };
        device.context = this;
        buffers.device = &device;
    }
    enum ggml_backend_dev_type kind;
    ggml_backend_device device = {};
    ggml_backend_buffer_type buffers = {};
};

void test_buffers_come_in_pieces_on_integrated_gpus() {
    fake_gpu discrete(GGML_BACKEND_DEVICE_TYPE_GPU);
    fake_gpu integrated(GGML_BACKEND_DEVICE_TYPE_IGPU);
    CHECK(s2moe_cuda_max_buffer_size(&discrete.buffers) == SIZE_MAX);
    CHECK(s2moe_cuda_max_buffer_size(&integrated.buffers) == size_t{1} << 30);
    integrated.buffers.device = nullptr;
    CHECK(s2moe_cuda_max_buffer_size(&integrated.buffers) == SIZE_MAX);
}

} // namespace

int main() {
    test_buffers_come_in_pieces_on_integrated_gpus();

    const std::unique_ptr<ggml_context, void (*)(ggml_context *)> ctx(ggml_init({1 << 16, nullptr, true}), ggml_free);
    run_record record;
    const auto make_op = [&](ggml_custom_op_t function, int64_t n, void * userdata) {
        ggml_tensor * source = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n);
        return ggml_custom_4d(ctx.get(), GGML_TYPE_F32, n, 1, 1, 1, &source, 1, function, 1, userdata);
    };
    ggml_tensor * op = make_op(on_host, 4, &record);
    ggml_tensor * unowned = make_op(on_host, 4, nullptr);
    ggml_tensor * large = make_op(on_host, 5, &record);
    ggml_tensor * other = make_op(on_host_too, 4, &record);
    auto * stream = reinterpret_cast<CUstream_st *>(&record);

    CHECK(!s2moe_cuda_supports_op(op) && !s2moe_cuda_run_op(op, stream) && record.dst == nullptr);

    s2moe_cuda_set_op(on_host, recording);
    CHECK(s2moe_cuda_supports_op(op) && !s2moe_cuda_supports_op(large) && !s2moe_cuda_supports_op(unowned));
    CHECK(!s2moe_cuda_supports_op(other) && !s2moe_cuda_run_op(other, stream) && record.dst == nullptr);
    CHECK(s2moe_cuda_run_op(op, stream) && record.dst == op && record.stream == stream);

    s2moe_cuda_set_op(on_host, {});
    CHECK(!s2moe_cuda_supports_op(op) && !s2moe_cuda_run_op(op, stream));
    return 0;
}

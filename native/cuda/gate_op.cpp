// The gate's operation on a GPU, in the graphs of ggml-cuda.

#include "gate.h"
#include "s2moe-cuda-op.h"
#include "speculation/gate.h"

namespace s2moe {

namespace {

device_gate * gate_of(void * userdata) {
    const auto & layer = *static_cast<const llama_moe_gate_layer *>(userdata);
    return dynamic_cast<device_gate *>(static_cast<const expert_gate *>(layer.owner)->on_device());
}

bool supports_gate(const ggml_tensor * op, void * userdata) {
    return gate_of(userdata) != nullptr && gate_rule_fits(op);
}

void run_gate(ggml_tensor * dst, CUstream_st * stream, void * userdata) {
    gate_of(userdata)->launch(gate_call_of(dst, *static_cast<const llama_moe_gate_layer *>(userdata)), stream);
}

} // namespace

std::unique_ptr<gate_device> create_cuda_gate(int device, int n_layer, int n_expert, int n_ids) {
    auto gate = std::make_unique<device_gate>(device, n_layer, n_expert, n_ids);
    s2moe_cuda_set_op(expert_gate::run, {supports_gate, run_gate});
    return gate;
}

} // namespace s2moe

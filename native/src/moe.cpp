// Thin, checked wrappers around the functions that the patch adds to libllama.

#include <algorithm>
#include <string>

#include "error.h"
#include "llama-moe.h"
#include "llama.h"
#include "s2moe.h"

using s2moe::fail;

namespace {

bool has_experts(const llama_context * ctx) {
    return llama_moe_model_n_expert(llama_get_model(ctx)) > 0;
}

constexpr const char * dense_model = "this model has no experts";

} // namespace

void s2moe_model_moe_info(const llama_model * model, s2moe_moe_info * info) {
    *info = {};
    info->n_layer = llama_model_n_layer(model);
    info->n_expert = llama_moe_model_n_expert(model);
    if (info->n_expert > 0) {
        info->n_moe_layer = llama_moe_model_n_moe_layer(model);
        info->n_expert_used = llama_moe_model_n_expert_used(model);
    }
}

int32_t s2moe_set_n_expert_used(llama_context * ctx, int32_t n_expert_used) {
    if (!has_experts(ctx)) {
        return fail(S2MOE_ERROR_UNSUPPORTED, dense_model);
    }
    if (llama_moe_set_n_expert_used(ctx, n_expert_used) != 0) {
        const int32_t k = llama_moe_model_n_expert_used(llama_get_model(ctx));
        return fail(S2MOE_ERROR_INVALID,
                    "n_expert_used is " + std::to_string(n_expert_used) + ", allowed are 1 to " + std::to_string(k) +
                        ", and 0 for the model's own");
    }
    return S2MOE_OK;
}

int32_t s2moe_n_expert_used(const llama_context * ctx) {
    return has_experts(ctx) ? llama_moe_get_n_expert_used(ctx) : 0;
}

int32_t s2moe_set_router_recording(llama_context * ctx, bool record) {
    if (!has_experts(ctx)) {
        return fail(S2MOE_ERROR_UNSUPPORTED, dense_model);
    }
    llama_moe_set_record(ctx, record);
    return S2MOE_OK;
}

int32_t s2moe_router_ids(llama_context * ctx, const int32_t ** ids, int32_t shape[3]) {
    return s2moe::guard(S2MOE_ERROR_INTERNAL, [&] {
        int32_t recorded_shape[3] = {};
        const int32_t * recorded =
            llama_moe_get_recorded(ctx, &recorded_shape[0], &recorded_shape[1], &recorded_shape[2]);
        if (recorded == nullptr) {
            throw s2moe::failure(S2MOE_ERROR_INVALID, "the last decode recorded no router ids");
        }
        std::copy_n(recorded_shape, 3, shape);
        *ids = recorded;
    });
}

int64_t s2moe_n_graph_reuses(const llama_context * ctx) {
    return llama_moe_get_n_graph_reuses(ctx);
}

// A small model whose experts come from the drive.

#pragma once

#include "check.h"

struct stored_model : test_model {
    s2moe_experts * experts = nullptr;

    // repacks: the weights that are not experts, too, as on a CPU; n_gpu_layers: that are computed on a GPU
    explicit stored_model(const char * options = "",
                          double share = 0,
                          uint32_t n_ctx = 128,
                          uint32_t n_sequences = 1,
                          bool repacks = true,
                          int32_t n_gpu_layers = 0,
                          const char * path = test_model_path())
        : test_model(unloaded{}) {
        int32_t status = 1;
        experts = s2moe_experts_open(path, options, &status);
        CHECK(experts != nullptr && status == S2MOE_OK);
        llama_model_params params = llama_model_default_params();
        params.load_mode = LLAMA_LOAD_MODE_NONE;
        params.use_extra_bufts = repacks;
        params.n_gpu_layers = n_gpu_layers;
        params.tensor_buft_overrides =
            static_cast<const llama_model_tensor_buft_override *>(s2moe_experts_overrides(experts));
        load(params, n_ctx, 64, n_sequences, path);
        allocate(share);
    }

    ~stored_model() {
        ctx.reset();
        model.reset();
        s2moe_experts_free(experts);
    }

    stored_model(const stored_model &) = delete;
    stored_model & operator=(const stored_model &) = delete;

    // share: 0 = the floor, 1 = slots for every expert
    void allocate(double share) const {
        const uint64_t floor = s2moe_experts_floor_bytes(experts);
        CHECK(s2moe_experts_allocate(experts, floor * (n_moe_layer() - 1) * share + floor) == S2MOE_OK);
    }

    int32_t n_moe_layer() const {
        return info().n_moe_layer;
    }

    s2moe_moe_info info() const {
        s2moe_moe_info result = {};
        s2moe_model_moe_info(model.get(), &result);
        return result;
    }

    s2moe_expert_stats stats() const {
        s2moe_expert_stats result = {};
        s2moe_experts_stats(experts, &result);
        return result;
    }

    std::vector<s2moe_expert_id> everything() const {
        std::vector<s2moe_expert_id> ids;
        for (int32_t layer = 0; layer < n_moe_layer(); ++layer) {
            for (int32_t expert = 0; expert < info().n_expert; ++expert) {
                ids.push_back({layer, expert});
            }
        }
        return ids;
    }
};

#include "llama-moe.h"

#include <string>

#include "llama-context.h"
#include "llama-model.h"
#include "llama-moe-internal.h"

void llama_moe_recorder::add(ggml_context * ctx,
                             ggml_cgraph * gf,
                             ggml_backend_sched_t sched,
                             ggml_backend_t host,
                             const llama_hparams & hparams,
                             ggml_tensor * sorted,
                             int64_t k,
                             int64_t n_tokens,
                             int il) {
    const int64_t n_rows_layer = sorted->ne[1];
    // a layer with a second group of experts (grovemoe) is recorded once, by its first
    if (n_rows_layer == 0 || (!layers.empty() && layers.back() == il)) {
        return;
    }
    if (ids == nullptr) {
        ids = ggml_new_tensor_3d(ctx, GGML_TYPE_I32, hparams.n_expert_used_max(), n_tokens, hparams.n_layer_all);
        ggml_set_name(ids, "moe_recorded_ids");
        ggml_set_output(ids);                                    // never freed or reused by the allocator
        ggml_backend_sched_set_tensor_backend(sched, ids, host); // no op computes it, so nothing else places it
    }
    k = std::min<int64_t>(k, hparams.n_expert_used_max());
    GGML_ASSERT(sorted->ne[0] >= k && n_rows_layer <= n_tokens);
    GGML_ASSERT(layers.size() < (size_t)ids->ne[2]);

    ggml_tensor * src = ggml_view_2d(ctx, sorted, k, n_rows_layer, sorted->nb[1], 0);
    ggml_tensor * dst = ggml_view_2d(ctx, ids, k, n_rows_layer, ids->nb[1], layers.size() * ids->nb[2]);
    ggml_build_forward_expand(gf, ggml_cpy(ctx, src, dst));
    layers.push_back(il);
    n_rows.push_back((int32_t)n_rows_layer);
}

void llama_moe_readback::begin(bool record, int32_t n_layer, int32_t k, int32_t n_tokens) {
    chunks.clear();
    n_used = 0;
    recording = record && k > 0;
    this->n_layer = n_layer;
    this->n_tokens = n_tokens;
    this->k = k;
    if (recording) {
        raw.resize((size_t)n_layer * n_tokens * k);
    }
}

void llama_moe_readback::append(const llama_moe_recorder & recorder,
                                const llama_ubatch & ubatch,
                                ggml_backend_sched_t sched) {
    if (!recording || recorder.ids == nullptr) {
        return;
    }
    const size_t n_values = recorder.layers.size() * ubatch.n_tokens * k;
    GGML_ASSERT(recorder.ids->ne[0] == k && recorder.ids->ne[1] == (int64_t)ubatch.n_tokens);
    GGML_ASSERT(n_used + n_values <= raw.size());

    chunk c = {};
    c.offset = n_used;
    c.n_tokens = (int32_t)ubatch.n_tokens;
    c.layers = recorder.layers;
    c.n_rows = recorder.n_rows;
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        c.tokens.push_back(ubatch.data->batch_idxs[i]);
        if (ubatch.output[i]) {
            c.outputs.push_back(ubatch.data->batch_idxs[i]);
        }
    }
    ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(sched, recorder.ids);
    GGML_ASSERT(backend != nullptr);
    ggml_backend_tensor_get_async(backend, recorder.ids, raw.data() + n_used, 0, n_values * sizeof(int32_t));
    n_used += n_values;
    chunks.push_back(std::move(c));
}

const int32_t * llama_moe_readback::get() {
    if (!recording || chunks.empty()) {
        return nullptr;
    }
    ids.assign((size_t)n_layer * n_tokens * k, -1);
    for (const chunk & c : chunks) {
        for (size_t j = 0; j < c.layers.size(); ++j) {
            // the last layer often routes only the tokens whose logits were asked for
            const auto & rows = c.n_rows[j] == c.n_tokens ? c.tokens : c.outputs;
            GGML_ASSERT(rows.size() == (size_t)c.n_rows[j]);
            const int32_t * src = raw.data() + c.offset + j * c.n_tokens * k;
            for (size_t row = 0; row < rows.size(); ++row) {
                int32_t * dst = ids.data() + ((size_t)c.layers[j] * n_tokens + rows[row]) * k;
                std::copy_n(src + row * k, k, dst);
            }
        }
    }
    return ids.data();
}

// Reaches the private members of llama_context that the extension needs; its only friend.
struct llama_moe_access {
    static llama_moe_params & params(llama_context & ctx) {
        return ctx.cparams.moe;
    }
    static llama_moe_readback & readback(llama_context & ctx) {
        return ctx.moe_readback;
    }
    static int32_t n_reused(const llama_context & ctx) {
        return ctx.n_reused;
    }
};

int32_t llama_moe_set_n_expert_used(llama_context * ctx, int32_t n_expert_used) {
    const int32_t k = llama_moe_model_n_expert_used(llama_get_model(ctx));
    if (n_expert_used < 0 || n_expert_used > k) {
        return -1;
    }
    llama_moe_access::params(*ctx).n_expert_used = n_expert_used == k ? 0 : n_expert_used;
    return 0;
}

int32_t llama_moe_get_n_expert_used(const llama_context * ctx) {
    return (int32_t)ctx->get_cparams().moe.resolve(llama_moe_model_n_expert_used(llama_get_model(ctx)));
}

void llama_moe_set_record(llama_context * ctx, bool record) {
    llama_moe_access::params(*ctx).record = record && llama_moe_model_n_expert(llama_get_model(ctx)) > 0;
}

const int32_t * llama_moe_get_recorded(llama_context * ctx, int32_t * n_layer, int32_t * n_tokens, int32_t * k) {
    ctx->synchronize();
    llama_moe_readback & readback = llama_moe_access::readback(*ctx);
    *n_layer = readback.n_layer;
    *n_tokens = readback.n_tokens;
    *k = readback.k;
    return readback.get();
}

void llama_moe_forget_recorded(llama_context * ctx) {
    ctx->synchronize(); // copies may still be under way
    llama_moe_access::readback(*ctx).begin(false, 0, 0, 0);
}

int32_t llama_moe_get_n_graph_reuses(const llama_context * ctx) {
    return llama_moe_access::n_reused(*ctx);
}

int32_t llama_moe_model_n_expert(const llama_model * model) {
    return (int32_t)model->hparams.n_expert;
}

int32_t llama_moe_model_n_expert_used(const llama_model * model) {
    return (int32_t)model->hparams.n_expert_used_max();
}

int32_t llama_moe_model_n_moe_layer(const llama_model * model) {
    int32_t n = 0;
    for (uint32_t il = 0; il < model->hparams.n_layer(); ++il) {
        n += model->layers[il].ffn_gate_inp != nullptr && model->layers[il].ffn_down_exps != nullptr;
    }
    return n;
}

bool llama_moe_is_stored(const ggml_tensor * tensor) {
    static const std::string name = "S2MOE_EXPERTS";
    return tensor->buffer != nullptr && name == ggml_backend_buffer_name(tensor->buffer);
}

const ggml_tensor * llama_moe_model_expert_tensor(const llama_model * model) {
    for (uint32_t il = 0; il < model->hparams.n_layer(); ++il) {
        if (model->layers[il].ffn_down_exps != nullptr) {
            return model->layers[il].ffn_down_exps;
        }
    }
    return nullptr;
}

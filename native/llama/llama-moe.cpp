#include "llama-moe.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-model.h"
#include "llama-moe-internal.h"

void llama_moe_recorder::add(ggml_context * ctx,
                             ggml_cgraph * gf,
                             ggml_backend_sched_t sched,
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
        ggml_set_output(ids); // never freed or reused by the allocator
        // no op computes it, so nothing else places it
        ggml_backend_sched_set_tensor_backend(sched, ids, ggml_backend_sched_get_backend(sched, 0));
    }
    k = std::min<int64_t>(k, hparams.n_expert_used_max());
    GGML_ASSERT(sorted->ne[0] >= k && n_rows_layer <= n_tokens);
    GGML_ASSERT(layers.size() < (size_t)ids->ne[2]);

    ggml_tensor * src = ggml_view_2d(ctx, sorted, k, n_rows_layer, sorted->nb[1], 0);
    ggml_tensor * dst = ggml_view_2d(ctx, ids, k, n_rows_layer, ids->nb[1], layers.size() * ids->nb[2]);
    ggml_tensor * copy = ggml_cpy(ctx, src, dst);
    // elsewhere it would write into that backend's copy of `ids`
    ggml_backend_sched_set_tensor_backend(sched, copy, ggml_backend_sched_get_backend(sched, 0));
    ggml_build_forward_expand(gf, copy);
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

ggml_tensor * llama_moe_build_gate(ggml_context * ctx,
                                   const llama_moe_params & params,
                                   ggml_tensor * scores,
                                   ggml_tensor * probs,
                                   int gating,
                                   bool scores_are_shifted,
                                   int64_t k,
                                   int il) {
    llama_moe_gate_layer & layer = params.gate_layers[il];
    layer.k = static_cast<int32_t>(k);
    layer.scores = (gating == LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX && !scores_are_shifted ? LLAMA_MOE_SCORES_LOG : 0) |
                   (gating == LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX_WEIGHT ? LLAMA_MOE_WEIGHTS_EXP : 0);
    ggml_tensor * sources[] = {scores, probs};
    ggml_tensor * gated =
        ggml_custom_4d(ctx, GGML_TYPE_F32, scores->ne[0], scores->ne[1], 1, 1, sources, 2, params.gate, 1, &layer);
    // behind what ggml keeps there: a backend that compares operations sees another one
    gated->op_params[std::size(gated->op_params) - 1] = layer.serial;
    return gated;
}

ggml_tensor * llama_moe_mul_mat_id(ggml_context * ctx,
                                   const llama_moe_params & params,
                                   llama_moe_recorder & recorder,
                                   ggml_tensor * experts,
                                   ggml_tensor * cur,
                                   ggml_tensor * ids) {
    for (int32_t i = 0; i < params.n_slot_layers; ++i) {
        llama_moe_slot_layer & layer = params.slot_layers[i];
        for (int32_t j = 0; j < layer.n_matrices; ++j) {
            if (layer.matrices[j].experts != experts) {
                continue;
            }
            if (recorder.remapped_ids != ids || recorder.remapped_layer != &layer) {
                recorder.slot_ids =
                    ggml_custom_4d(ctx, GGML_TYPE_I32, ids->ne[0], ids->ne[1], 1, 1, &ids, 1, params.remap, 1, &layer);
                recorder.remapped_ids = ids;
                recorder.remapped_layer = &layer;
            }
            return ggml_mul_mat_id(ctx, layer.matrices[j].slots, cur, recorder.slot_ids);
        }
    }
    return ggml_mul_mat_id(ctx, experts, cur, ids);
}

struct llama_moe_graphs {
    ggml_backend_sched_ptr sched;
    std::array<llm_graph_result_ptr, 2> results;
    llm_graph_result * active = nullptr;
    std::vector<ggml_backend_t> backends;
};

// Reaches the private members of llama_context and llama_kv_cache that the extension needs; their only friend.
struct llama_moe_access {
    static llama_moe_params & params(llama_context & ctx) {
        return ctx.cparams.moe;
    }
    static llama_moe_readback & readback(llama_context & ctx) {
        return ctx.moe_readback;
    }
    // Buffers for the largest graph as it is now.
    static void reserve(llama_context & ctx) {
        ctx.sched_need_reserve = true;
        ctx.sched_reserve();
    }
    static const std::vector<ggml_backend_t> & backends(const llama_context & ctx) {
        return ctx.backend_ptrs;
    }
    static int32_t n_reused(const llama_context & ctx) {
        return ctx.n_reused;
    }
    static std::unique_ptr<llama_moe_graphs> create_graphs(llama_context & ctx);
    static void swap_graphs(llama_context & ctx, llama_moe_graphs & graphs);
    static std::vector<llama_kv_cache *> caches(llama_context & ctx);
    static bool is_unified(const llama_kv_cache & cache) {
        return cache.n_stream == 1 && cache.other == nullptr;
    }
    static void order_cells(llama_kv_cache & cache, llama_pos begin, const std::vector<uint32_t> & cells);
    static std::vector<uint32_t> cells_from(const llama_kv_cache & cache, llama_pos begin);
};

std::unique_ptr<llama_moe_graphs> llama_moe_access::create_graphs(llama_context & ctx) {
    auto graphs = std::make_unique<llama_moe_graphs>();
    graphs->backends = ctx.backend_ptrs;
    graphs->sched.reset(ggml_backend_sched_new(ctx.backend_ptrs.data(),
                                               ctx.backend_buft.data(),
                                               static_cast<int>(ctx.backend_ptrs.size()),
                                               ctx.get_gf_res_reserve()->get_max_nodes(),
                                               false,
                                               ctx.cparams.op_offload));
    return graphs;
}

void llama_moe_access::swap_graphs(llama_context & ctx, llama_moe_graphs & graphs) {
    ctx.synchronize();
    std::swap(ctx.sched, graphs.sched);
    std::swap(ctx.gf_res_prev, graphs.results);
    std::swap(ctx.gf_res_prev_active, graphs.active);
}

// The caches that hold the context's keys and values; empty for a kind that cannot be cut at will.
std::vector<llama_kv_cache *> llama_moe_access::caches(llama_context & ctx) {
    llama_memory_i * memory = ctx.get_memory();
    if (auto * cache = dynamic_cast<llama_kv_cache *>(memory)) {
        return {cache};
    }
    if (auto * cache = dynamic_cast<llama_kv_cache_iswa *>(memory)) {
        return {cache->get_base(), cache->get_swa()};
    }
    return {};
}

// Cells of any sequence at position `begin` or later, by index.
std::vector<uint32_t> llama_moe_access::cells_from(const llama_kv_cache & cache, llama_pos begin) {
    const llama_kv_cells & cells = cache.v_cells[0];
    std::vector<uint32_t> result;
    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (!cells.is_empty(i) && cells.pos_get(i) >= begin) {
            result.push_back(i);
        }
    }
    return result;
}

// Moves what sequence 0 has from position `begin` on to the first of `cells`, in the order of positions.
void llama_moe_access::order_cells(llama_kv_cache & cache, llama_pos begin, const std::vector<uint32_t> & cells) {
    llama_kv_cells & meta = cache.v_cells[0];
    std::vector<uint32_t> from;
    const auto & positions = meta.seq_pos_get(0);
    for (auto it = positions.lower_bound({begin, 0}); it != positions.end(); ++it) {
        from.push_back(it->second);
    }
    const std::vector<uint32_t> to(cells.begin(), cells.begin() + static_cast<int64_t>(from.size()));
    if (from == to) {
        return;
    }
    // neighbouring cells go out and come back together: each piece is a round trip to a GPU
    std::vector<uint32_t> touched = from;
    touched.insert(touched.end(), to.begin(), to.end());
    std::sort(touched.begin(), touched.end());
    touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
    const auto place_of = [&](uint32_t cell) {
        return static_cast<size_t>(std::lower_bound(touched.begin(), touched.end(), cell) - touched.begin());
    };
    const auto each_run = [&](size_t stride, const auto & move) {
        for (size_t first = 0, end = 0; first < touched.size(); first = end) {
            for (end = first + 1; end < touched.size() && touched[end] == touched[end - 1] + 1; ++end) {
            }
            move(first * stride, touched[first] * stride, (end - first) * stride);
        }
    };
    std::vector<char> before;
    std::vector<char> after;
    const auto move_rows = [&](ggml_tensor * tensor, size_t offset, size_t stride) {
        before.resize(touched.size() * stride);
        each_run(stride, [&](size_t at, size_t cells, size_t n_bytes) {
            ggml_backend_tensor_get(tensor, before.data() + at, offset + cells, n_bytes);
        });
        after = before;
        for (size_t i = 0; i < from.size(); ++i) {
            std::memcpy(after.data() + place_of(to[i]) * stride, before.data() + place_of(from[i]) * stride, stride);
        }
        each_run(stride, [&](size_t at, size_t cells, size_t n_bytes) {
            ggml_backend_tensor_set(tensor, after.data() + at, offset + cells, n_bytes);
        });
    };
    for (const auto & layer : cache.layers) {
        move_rows(layer.k, 0, layer.k->nb[1]);
        if (layer.v == nullptr) {
            continue;
        }
        if (!cache.v_trans) {
            move_rows(layer.v, 0, layer.v->nb[1]);
            continue;
        }
        const size_t value_bytes = ggml_element_size(layer.v);
        const auto n_cells = static_cast<size_t>(meta.size());
        for (int64_t j = 0; j < layer.v->ne[0]; ++j) {
            move_rows(layer.v, j * n_cells * value_bytes, value_bytes);
        }
    }
    const llama_kv_cells moved = meta.cp(from);
    for (const uint32_t i : from) {
        meta.rm(i);
    }
    meta.set(to, moved);
    cache.v_heads[0] = to.back() + 1;
}

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

void llama_moe_set_gate(llama_context * ctx, ggml_custom_op_t gate, llama_moe_gate_layer * layers) {
    llama_moe_params & params = llama_moe_access::params(*ctx);
    params.gate = gate;
    params.gate_layers = gate == nullptr ? nullptr : layers;
    params.gate_serial = gate == nullptr ? 0 : layers->serial;
}

void llama_moe_set_slots(llama_context * ctx, ggml_custom_op_t remap, llama_moe_slot_layer * layers, int32_t n_layers) {
    llama_moe_params & params = llama_moe_access::params(*ctx);
    params.remap = remap;
    params.slot_layers = remap == nullptr ? nullptr : layers;
    params.n_slot_layers = remap == nullptr ? 0 : n_layers;
    if (remap != nullptr) {
        llama_moe_access::reserve(*ctx);
    }
}

int32_t llama_moe_gpu(const llama_context * ctx) {
    int32_t number = -1;
    int n_gpus = 0;
    for (ggml_backend_t backend : llama_moe_access::backends(*ctx)) {
        ggml_backend_dev_t device = ggml_backend_get_device(backend);
        const auto type = device == nullptr ? GGML_BACKEND_DEVICE_TYPE_CPU : ggml_backend_dev_type(device);
        if (type != GGML_BACKEND_DEVICE_TYPE_GPU && type != GGML_BACKEND_DEVICE_TYPE_IGPU) {
            continue;
        }
        ++n_gpus;
        ggml_backend_reg_t kind = ggml_backend_dev_backend_reg(device);
        for (size_t i = 0; i < ggml_backend_reg_dev_count(kind); ++i) {
            if (ggml_backend_reg_dev_get(kind, i) == device) {
                number = static_cast<int32_t>(i);
            }
        }
    }
    return n_gpus == 1 ? number : -1;
}

llama_moe_graphs * llama_moe_graphs_create(llama_context * ctx) {
    return llama_moe_access::create_graphs(*ctx).release();
}

void llama_moe_graphs_free(llama_moe_graphs * graphs) {
    delete graphs;
}

void llama_moe_swap_graphs(llama_context * ctx, llama_moe_graphs * graphs) {
    llama_moe_access::swap_graphs(*ctx, *graphs);
}

size_t llama_moe_graphs_bytes(const llama_moe_graphs * graphs) {
    size_t n_bytes = 0;
    for (ggml_backend_t backend : graphs->backends) {
        n_bytes += ggml_backend_sched_get_buffer_size(graphs->sched.get(), backend);
    }
    return n_bytes;
}

bool llama_moe_can_branch(llama_context * ctx) {
    const auto caches = llama_moe_access::caches(*ctx);
    // without flash attention the sums over keys depend on which cells they lie in
    return !caches.empty() && ctx->get_cparams().flash_attn &&
           std::all_of(caches.begin(), caches.end(), [](auto * cache) { return llama_moe_access::is_unified(*cache); });
}

void llama_moe_kv_commit(llama_context * ctx, llama_seq_id seq, llama_pos begin, llama_pos end) {
    const auto caches = llama_moe_access::caches(*ctx);
    std::vector<std::vector<uint32_t>> cells;
    for (const llama_kv_cache * cache : caches) {
        cells.push_back(llama_moe_access::cells_from(*cache, begin));
    }
    llama_memory_i * memory = ctx->get_memory();
    memory->seq_rm(seq, end, -1);
    if (seq != 0) {
        memory->seq_rm(0, begin, -1);
        memory->seq_cp(seq, 0, begin, end);
    }
    for (llama_seq_id s = 1; s < static_cast<llama_seq_id>(ctx->n_seq_max()); ++s) {
        if (memory->seq_pos_max(s) >= 0) {
            memory->seq_rm(s, -1, -1);
        }
    }
    for (size_t i = 0; i < caches.size(); ++i) {
        llama_moe_access::order_cells(*caches[i], begin, cells[i]);
    }
}

bool llama_moe_model_is_draftable(const llama_model * model) {
    return llama_moe_model_n_moe_layer(model) > 0 && !llama_model_is_recurrent(model) &&
           !llama_model_is_hybrid(model) && !llama_model_is_diffusion(model) && !llama_model_has_encoder(model);
}

// Experts per decode and recorded router ids, on one context whose settings change between decodes.

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>

#include "check.h"
#include "llama-moe.h"

namespace {

std::vector<float> evaluate(const test_model & m, const std::vector<int32_t> & tokens) {
    m.clear();
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), tokens.size(), 0, false) == S2MOE_OK);
    return m.logits();
}

void test_range(const test_model & m, int32_t k) {
    CHECK(s2moe_set_n_expert_used(m.ctx.get(), k + 1) == S2MOE_ERROR_INVALID);
    CHECK(s2moe_set_n_expert_used(m.ctx.get(), -1) == S2MOE_ERROR_INVALID);
    CHECK(s2moe_n_expert_used(m.ctx.get()) == k);
}

// A reused graph must never serve the setting of the decode before.
void test_switching_is_exact(const test_model & m, int32_t k) {
    const auto tokens = m.tokens(8);
    std::vector<std::vector<float>> fresh;
    for (int32_t n = 1; n <= k; ++n) {
        test_model other;
        CHECK(s2moe_set_n_expert_used(other.ctx.get(), n) == S2MOE_OK);
        fresh.push_back(evaluate(other, tokens));
    }
    CHECK(fresh.front() != fresh.back());
    const int64_t reuses = s2moe_n_graph_reuses(m.ctx.get());
    for (const int32_t n : {k, 1, 1, 1, k, 1, k, k, k}) {
        CHECK(s2moe_set_n_expert_used(m.ctx.get(), n) == S2MOE_OK);
        CHECK(s2moe_n_expert_used(m.ctx.get()) == n);
        CHECK(evaluate(m, tokens) == fresh[n - 1]);
    }
    CHECK(s2moe_n_graph_reuses(m.ctx.get()) > reuses); // where the setting stayed, the graph did too
    CHECK(s2moe_set_n_expert_used(m.ctx.get(), 0) == S2MOE_OK);
    CHECK(s2moe_n_expert_used(m.ctx.get()) == k);
    CHECK(evaluate(m, tokens) == fresh[k - 1]);
}

void test_graph_is_reused_while_nothing_changes(const test_model & m) {
    m.clear();
    const auto tokens = m.tokens(6);
    int64_t before = 0;
    for (int32_t i = 0; i < 6; ++i) {
        before = s2moe_n_graph_reuses(m.ctx.get());
        CHECK(s2moe_decode(m.ctx.get(), &tokens[i], 1, i, false) == S2MOE_OK);
    }
    CHECK(s2moe_n_graph_reuses(m.ctx.get()) == before + 1);
}

void test_recording(const test_model & m, const s2moe_moe_info & info) {
    const int32_t k = info.n_expert_used;
    const int32_t * ids = nullptr;
    int32_t shape[3] = {};
    m.clear();
    const auto tokens = m.tokens(5);
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 5, 0, true) == S2MOE_OK);
    CHECK(s2moe_router_ids(m.ctx.get(), &ids, shape) == S2MOE_ERROR_INVALID);
    const auto without = m.logits();

    CHECK(s2moe_set_router_recording(m.ctx.get(), true) == S2MOE_OK);
    m.clear();
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 5, 0, true) == S2MOE_OK);
    CHECK(m.logits() == without);
    CHECK(s2moe_router_ids(m.ctx.get(), &ids, shape) == S2MOE_OK);
    CHECK(shape[0] == info.n_layer && shape[1] == 5 && shape[2] == k);
    int32_t n_routed_layers = 0;
    for (int32_t layer = 0; layer < shape[0]; ++layer) {
        const int32_t * rows = ids + layer * 5 * k;
        n_routed_layers += rows[0] >= 0;
        for (int32_t token = 0; token < 5; ++token) {
            const std::set<int32_t> distinct(rows + token * k, rows + (token + 1) * k);
            if (rows[0] >= 0) {
                CHECK(static_cast<int32_t>(distinct.size()) == k && *distinct.begin() >= 0);
                CHECK(*distinct.rbegin() < info.n_expert);
            } else {
                CHECK(distinct == std::set<int32_t>{-1});
            }
        }
    }
    CHECK(n_routed_layers == info.n_moe_layer);

    // a sparse decode still records the k best, and its first MoE layer sees the same input
    const std::vector<int32_t> full(ids, ids + shape[0] * 5 * k);
    CHECK(s2moe_set_n_expert_used(m.ctx.get(), 1) == S2MOE_OK);
    m.clear();
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 5, 0, true) == S2MOE_OK);
    CHECK(s2moe_router_ids(m.ctx.get(), &ids, shape) == S2MOE_OK);
    CHECK(shape[2] == k);
    const int32_t first = std::find_if(full.begin(), full.end(), [](int32_t id) { return id >= 0; }) - full.begin();
    CHECK(std::equal(ids + first, ids + first + 5 * k, full.begin() + first));
    CHECK(s2moe_set_n_expert_used(m.ctx.get(), 0) == S2MOE_OK);

    // the last layer routes only what has logits
    m.clear();
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 5, 0, false) == S2MOE_OK);
    CHECK(s2moe_router_ids(m.ctx.get(), &ids, shape) == S2MOE_OK);
    const int32_t * last = ids + (shape[0] - 1) * 5 * k;
    CHECK(std::all_of(last, last + 4 * k, [](int32_t id) { return id == -1; }));
    CHECK(std::equal(last + 4 * k, last + 5 * k, full.end() - k));

    // a failed decode leaves nothing to read
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 5, 99, false) == S2MOE_ERROR_INVALID);
    int32_t untouched[3] = {7, 7, 7};
    CHECK(s2moe_router_ids(m.ctx.get(), &ids, untouched) == S2MOE_ERROR_INVALID);
    CHECK(untouched[0] == 7 && untouched[1] == 7 && untouched[2] == 7);
    CHECK(s2moe_set_router_recording(m.ctx.get(), false) == S2MOE_OK);
}

void gate_that_changes_nothing(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith == 0) {
        std::memcpy(dst->data, dst->src[0]->data, ggml_nbytes(dst));
        const auto & layer = *static_cast<llama_moe_gate_layer *>(userdata);
        // what a GPU compares to find out whether it has captured the same operation before
        *static_cast<int32_t *>(layer.owner) = dst->op_params[std::size(dst->op_params) - 1];
    }
}

// The memory of a gate that is gone may be that of the next one: graphs must not be taken for those of the first.
void test_layers_of_another_gate(const test_model & m, const s2moe_moe_info & info) {
    m.clear();
    const auto tokens = m.tokens(6);
    std::vector<llama_moe_gate_layer> layers(info.n_layer);
    int32_t last = 0;
    for (int32_t i = 0; i < 6; ++i) {
        const int32_t serial = i < 3 ? 1 : 2;
        if (i == 0 || i == 3) {
            std::fill(layers.begin(), layers.end(), llama_moe_gate_layer{&last, 0, 0, 0, serial});
        }
        llama_moe_set_gate(m.ctx.get(), gate_that_changes_nothing, layers.data());
        CHECK(s2moe_decode(m.ctx.get(), &tokens[i], 1, i, false) == S2MOE_OK);
        llama_moe_set_gate(m.ctx.get(), nullptr, nullptr);
        CHECK(last == serial);
        CHECK(layers.back().k == info.n_expert_used);
    }
}

} // namespace

int main() {
    const test_model m;
    s2moe_moe_info info = {};
    s2moe_model_moe_info(m.model.get(), &info);
    CHECK(info.n_expert >= info.n_expert_used && info.n_expert_used >= 2 && info.n_moe_layer >= 1);
    test_range(m, info.n_expert_used);
    test_switching_is_exact(m, info.n_expert_used);
    test_graph_is_reused_while_nothing_changes(m);
    test_recording(m, info);
    test_layers_of_another_gate(m, info);
    return 0;
}

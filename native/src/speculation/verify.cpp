#include "verify.h"

#include "error.h"
#include "llama-moe.h"

namespace s2moe {

verifier::verifier(llama_context * ctx, expert_cache * experts, int n_sequences)
    : ctx(ctx), experts(experts), n_sequences(n_sequences), target_gate(ctx, experts), graphs(ctx) {
}

void verifier::evaluate(llama_token root,
                        llama_pos at,
                        std::span<const verify_node> tree,
                        const gate_settings & settings,
                        double credit,
                        bool gated) {
    const int n = static_cast<int>(tree.size());
    position = at;
    depths.clear();
    sequences.assign(n, 0);

    // every leaf is a sequence; a node belongs to those of the leaves below it
    std::vector<std::vector<llama_seq_id>> members(n);
    std::vector<bool> is_leaf(n, true);
    for (const verify_node & each : tree) {
        depths.push_back(each.depth);
        if (each.parent >= 0) {
            is_leaf[each.parent] = false;
        }
    }
    n_used_sequences = 0;
    std::vector<llama_seq_id> all;
    for (int i = 0; i < n; ++i) {
        if (!is_leaf[i]) {
            continue;
        }
        all.push_back(n_used_sequences);
        for (int j = i; j >= 0; j = tree[j].parent) {
            members[j].push_back(n_used_sequences);
            sequences[j] = n_used_sequences;
        }
        ++n_used_sequences;
    }
    if (n == 0) {
        all = {0};
        n_used_sequences = 1;
    }
    if (n_used_sequences > n_sequences) {
        throw failure(S2MOE_ERROR_INTERNAL, "more leaves than the context has sequences");
    }
    if (n > 0) {
        // llama.cpp builds a graph anew when the number of sequences changes, so the root is in all there are
        for (; n_used_sequences < n_sequences; ++n_used_sequences) {
            all.push_back(n_used_sequences);
        }
    }
    token_batch batch;
    std::vector<double> prefixes = {1};
    batch.add(root, at, all, true);
    for (int i = 0; i < n; ++i) {
        batch.add(tree[i].token, at + tree[i].depth, members[i], true);
        prefixes.push_back(tree[i].path);
    }
    try {
        llama_memory_t memory = llama_get_memory(ctx);
        for (llama_seq_id s = 1; s < n_used_sequences; ++s) {
            llama_memory_seq_cp(memory, 0, s, -1, -1);
        }
        const auto use = graphs.of(gated ? n + 1 : 0);
        if (gated) {
            target_gate.begin_target(settings, prefixes, credit);
        } else {
            target_gate.forget(n + 1);
        }
        run_batch(ctx, batch, at, n_used_sequences, decode_kind::verify, experts);
        target_gate.collect(n + 1);
    } catch (...) {
        target_gate.end();
        discard();
        throw;
    }
    target_gate.end();
}

void verifier::commit(int node) {
    if (depths.empty()) {
        return; // the root alone is where it belongs, and there is nothing else
    }
    const int n_kept = node < 0 ? 1 : 1 + depths[node];
    llama_moe_kv_commit(ctx, node < 0 ? 0 : sequences[node], position, position + n_kept);
}

void verifier::discard() {
    llama_memory_t memory = llama_get_memory(ctx);
    for (llama_seq_id s = 1; s < n_used_sequences; ++s) {
        llama_memory_seq_rm(memory, s, -1, -1);
    }
    llama_memory_seq_rm(memory, 0, position, -1);
}

} // namespace s2moe

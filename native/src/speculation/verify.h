// Verification: the root and a tree of drafts in one batch of the target.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "decode.h"
#include "gate.h"
#include "graphs.h"

namespace s2moe {

struct verify_node {
    int parent = -1; // index in the tree, before its children; -1: the root
    llama_token token = 0;
    int depth = 1;
    double path = 0;       // probability that the draft gives the path to it
    double confidence = 0; // of this token, given its parent
};

class verifier {
  public:
    verifier(llama_context * ctx, expert_cache * experts, int n_sequences);

    /*
     * Evaluates the root at `position` and the tree behind it. Row 0 of the logits is the root's, row i + 1 that of
     * tree[i]. Throws failure as run_batch(); the KV cache is then as before. Otherwise commit() or discard() must
     * follow.
     *
     *   gated  false: without the gate, which then knows nothing of the rows; for a root alone whose experts are not to
     * be bent, since a graph without it is some 2 % faster where all experts are in memory
     */
    void evaluate(llama_token root,
                  llama_pos position,
                  std::span<const verify_node> tree,
                  const gate_settings & settings,
                  double credit,
                  bool gated);

    // Keeps the root and the path to tree[node] (-1: the root alone), and nothing else.
    void commit(int node);

    // Keeps nothing.
    void discard();

    const expert_gate & gate() const {
        return target_gate;
    }
    size_t graph_bytes() const {
        return graphs.n_bytes();
    }

  private:
    llama_context * ctx;
    expert_cache * experts;
    const int n_sequences;
    expert_gate target_gate;
    graph_sets graphs;

    llama_pos position = 0;
    std::vector<int> depths;             // of the tree's nodes
    std::vector<llama_seq_id> sequences; // of a leaf below each node
    int n_used_sequences = 1;            // of the last evaluation: those of leaves, and of the root alone
};

} // namespace s2moe

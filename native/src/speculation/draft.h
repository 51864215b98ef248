// Context-aligned drafting: the model evaluates its own drafts with fewer experts.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "decode.h"
#include "expert_set.h"
#include "gate.h"
#include "graphs.h"

namespace s2moe {

// What the draft thinks of one token.
struct draft_view {
    std::vector<std::pair<int32_t, double>> next; // the likeliest next tokens with their probabilities, best first
    expert_set predicted;                         // the router's choice with all k experts, by layer
    expert_set likely;                            // of them, those worth reading ahead
};

/*
 * Evaluates a tree of drafts node by node, each on the KV rows of its path. The rows are temporary: end() takes them
 * out, and what is committed is never written.
 *
 * With the target's context the committed rows are the target's own ("shared"). With a context of its own the drafter
 * must be fed the committed tokens, and evaluates them with the draft's experts, too.
 */
class drafter {
  public:
    /*
     *   ctx          where drafts are evaluated
     *   shared       whether that is the target's context
     *   n_sequences  that ctx has; at most so many leaves can be drafted
     */
    drafter(llama_context * ctx, expert_cache * experts, bool shared, int n_sequences);

    // The committed tokens from position 0 on, for a context of its own.
    void feed(std::vector<llama_token> tokens);

    // Before the first evaluate() of a step. root: the token at `position`, not committed yet.
    void begin(llama_token root, llama_pos position, int n_expert_used);

    // Evaluates the root (parent -1, token ignored) or a child of the parent-th node evaluated before; nodes are
    // numbered from 0 in the order of evaluation, the root being 0. Throws failure as run_batch(); std::length_error
    // when there are too many leaves.
    draft_view evaluate(int parent, llama_token token);

    // Takes all temporary rows out.
    void end();

    // Of the last begin(), the seconds spent on tokens that were committed before the last step: a prompt, or what was
    // decoded while nothing was drafted. 0 with the target's context.
    double backlog_seconds() const {
        return backlog;
    }

    bool is_shared() const {
        return shared;
    }
    // Experts that were in memory when the last evaluation began.
    const expert_set & resident() const {
        return gate.resident();
    }
    // Experts that it used.
    int n_used_experts() const {
        return gate.rows().front().chosen.size();
    }
    size_t graph_bytes() const {
        return graphs.n_bytes();
    }

  private:
    struct node {
        int depth = 0;
        llama_seq_id sequence = 0;
        bool extended = false; // a child goes on in its sequence
    };

    void catch_up(llama_pos position);
    draft_view look() const;

    llama_context * ctx;
    expert_cache * experts;
    const bool shared;
    const int n_sequences;
    expert_gate gate;
    graph_sets graphs;

    llama_token root = 0;
    llama_pos position = 0;
    int k_draft = 1;
    std::vector<node> nodes;
    int n_used_sequences = 0;
    std::vector<llama_token> committed; // of a context of its own
    size_t n_evaluated = 0;             // of them, in its KV cache
    double backlog = 0;
};

} // namespace s2moe

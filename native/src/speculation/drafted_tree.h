// The tree of drafts of one step: who is evaluated, what is read ahead, what is to be verified.

#pragma once

#include <functional>
#include <span>
#include <vector>

#include "calibration.h"
#include "draft.h"
#include "expansion.h"
#include "s2moe.h"
#include "verify.h"

namespace s2moe {

struct drafted_tree {
    std::vector<verify_node> nodes;    // parents before their children
    std::vector<expert_set> predicted; // of the root, then of the nodes; empty where the draft never looked
    int n_drafted = 0;                 // drafts evaluated or to be verified
    bool used = false;                 // the draft evaluated something
};

// What a tree needs while it grows.
struct draft_surroundings {
    // As drafter::evaluate(): evaluations are numbered from 0, the root's, in their order.
    std::function<draft_view(int parent, int32_t token)> evaluate;
    // Experts in memory when the last evaluation began.
    std::function<const expert_set &()> resident;
    // Everything that the verification is expected to use, as far as it is known: a larger set each time.
    std::function<void(const expert_set & needed)> pin;
    // Experts that are not in memory, in layer order; each one once in a step.
    std::function<void(std::span<const s2moe_expert_id> missing)> read_ahead;
    const calibration & confidences;
};

// `width` chains of the likeliest tokens, each `depth` drafts long at most, the i-th beginning with the i-th likeliest;
// n_nodes drafts in all.
drafted_tree draft_fixed(const draft_surroundings & around, int n_nodes, int depth, int width);

struct adaptive_limits {
    int n_nodes = 7;          // drafts to verify
    int n_evaluations = 8;    // of the draft, the root's included
    int n_sequences = 1;      // leaves, of the drafted tree as of the verified one; 1: a chain
    double typical_hits = -1; // of a node in earlier steps, as for expansion::set_typical(); < 0: unknown
    double typical_misses = -1;
};

// What expansion admits. The likeliest experts of the root, and of a node as soon as it is admitted, are read ahead.
drafted_tree
draft_adaptively(const draft_surroundings & around, const expansion_costs & costs, const adaptive_limits & limits);

} // namespace s2moe

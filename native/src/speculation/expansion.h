// Which drafts to evaluate and which to verify: routing-aware adaptive expansion.

#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "speculation/calibration.h"
#include "speculation/expert_set.h"

namespace s2moe {

struct expansion_costs {
    // negative numbers count as 0; where one is not finite nothing is admitted
    double single_seconds = 0; // an evaluation of one token by the target; 0 = unknown: nothing is admitted
    double row_seconds = 0;    // what one more row adds to a verification, without its experts
    double hit_seconds = 0;    // ... one more resident expert
    double miss_seconds = 0;   // ... one more missing expert that prefetching will not hide
    double draft_seconds = 0;  // the draft's evaluation of one node
};

struct expansion_limits {
    int nodes_max = 7;    // admitted
    int depth_max = 7;    // children of the root have depth 1
    int children_max = 4; // candidates of one parent
    int leaves_max = 8;   // admitted nodes without admitted children
    bool width = true;    // false: a chain
};

struct draft_node {
    int parent = -1; // -1: the root
    int32_t token = 0;
    int depth = 0;
    double confidence = 0; // the draft's probability of the token given its parent
    double calibrated = 0; // the same, corrected by what was accepted before
    double path = 0;       // product of the calibrated ones from the root: probability that the node is accepted
    expert_set predicted;  // empty until evaluated
    bool evaluated = false;
    bool admitted = false;
};

// Grows the tree of one iteration. The caller offers the draft's continuations of the root, then
//
//     while ((i = next()) >= 0) { evaluate node i with the draft; evaluated(i, its routing);
//                                 for (n : take_admitted()) { prefetch n's experts; offer(n, its continuations) } }
//     finish();
//     verify the root and admitted().
//
// An accepted node saves an evaluation of one token, so node i is worth path_i * single_seconds. Two tests:
//
//   decode test   path * single >= row + experts + draft, before the draft evaluates a candidate. Optimistically the
//                 candidate uses its parent's experts; the parent being admitted, they are all covered and cost
//                 nothing.
//   admit test    path * single >= row + hit * new resident + miss * new missing, once its own routing is known; "new"
//                 are experts that neither the root nor an admitted node uses. What the draft cost is spent.
//
// Admission is greedy: of all evaluated nodes whose parent is admitted, the one that gains most, costs being computed
// again after each, until none passes. Ties go to the larger confidence, then to the earlier offer.
//
// finish() exists because a draft needs no evaluation of its own to be verified: its token came from its parent. The
// draft's evaluation yields its routing, which sharpens the admit test, and its children. Once it is known what nodes
// cost on average, a node is evaluated only if it would be admitted at that price, and a child that is as likely given
// the node as the node given its parent would gain more than the evaluation costs. The others are left to finish(),
// which judges them by the average. (With evaluations of every candidate that passes the decode test, more than half
// were of nodes never admitted, and drafting lost what it gained: docs/speculation.md.)
class expansion {
  public:
    // root: the experts that the root's own row will use, covered from the start; resident: those in memory.
    expansion(expansion_costs costs, expansion_limits limits, expert_set root, expert_set resident);

    // Continuations of an evaluated node or of the root (-1), best first. Tokens that the parent already has, and
    // those beyond children_max or depth_max, are left out. std::out_of_range: no such node.
    void offer(int parent, std::span<const std::pair<int32_t, double>> tokens_and_confidences, const calibration & by);

    // The candidate that the draft should evaluate next: the one with the largest path whose parent is admitted, that
    // passes the decode test, is not left to finish() and would be let in by the limits; -1: none. The same one until
    // it is evaluated.
    int next() const;

    // The routing of a candidate. std::out_of_range: no such node; std::invalid_argument: a set of another model.
    void evaluated(int node, expert_set predicted);

    // Nodes that evaluated() admitted since the last call, in order of admission.
    std::vector<int> take_admitted();

    // Admits the candidates, most likely ones first, that pass the admit test with the mean numbers of new experts of
    // the nodes admitted in this iteration, or else the typical ones; none where neither is known. Returns them.
    std::vector<int> finish();

    // Mean new experts of a node in earlier iterations. Numbers that are negative or not finite are ignored.
    void set_typical(double new_hits, double new_misses);

    const std::vector<draft_node> & nodes() const;
    // In order of admission: a parent comes before its children.
    const std::vector<int> & admitted() const;
    int n_admitted() const;
    // Leaves of the admitted tree.
    int n_leaves() const;
    // Experts of the root and of the admitted nodes whose routing is known.
    const expert_set & covered() const;

    // New experts of the nodes that evaluated() admitted, summed: what later iterations call typical.
    int n_new_hits() const;
    int n_new_misses() const;
    int n_new_nodes() const;

  private:
    bool parent_admitted(const draft_node & node) const;
    bool fits(const draft_node & node) const;
    bool may_have_children(const draft_node & node) const;
    bool pays(const draft_node & node, double cost) const;
    bool child_pays(const draft_node & node, double routing_seconds) const;
    double typical_seconds() const;
    double admission_seconds(const draft_node & node) const;
    void admit(int node);
    void admit_evaluated();

    expansion_costs costs;
    expansion_limits limits;
    expert_set resident;
    expert_set united;
    std::vector<draft_node> tree;
    std::vector<int> n_admitted_children; // by node
    std::vector<int> order;
    std::vector<int> fresh;
    int leaves = 0;
    int new_hits = 0, new_misses = 0, new_nodes = 0;
    double typical_hits = -1, typical_misses = -1; // -1: unknown
};

} // namespace s2moe

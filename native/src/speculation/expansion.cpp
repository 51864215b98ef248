#include "speculation/expansion.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace s2moe {

namespace {

expansion_costs checked(const expansion_costs & costs) {
    const double sum =
        costs.single_seconds + costs.row_seconds + costs.hit_seconds + costs.miss_seconds + costs.draft_seconds;
    if (!std::isfinite(sum)) {
        return {};
    }
    return {std::max(costs.single_seconds, 0.0),
            std::max(costs.row_seconds, 0.0),
            std::max(costs.hit_seconds, 0.0),
            std::max(costs.miss_seconds, 0.0),
            std::max(costs.draft_seconds, 0.0)};
}

void check_node(int node, size_t n_nodes) {
    if (node < 0 || static_cast<size_t>(node) >= n_nodes) {
        throw std::out_of_range("expansion: no node " + std::to_string(node));
    }
}

// Whether a is to be preferred.
bool likelier(const draft_node & a, const draft_node & b) {
    return a.path != b.path ? a.path > b.path : a.confidence > b.confidence;
}

} // namespace

expansion::expansion(expansion_costs costs, expansion_limits limits, expert_set root, expert_set resident)
    : costs(checked(costs)), limits(limits), resident(std::move(resident)), united(std::move(root)) {
    if (!limits.width) {
        this->limits.children_max = std::min(limits.children_max, 1);
    }
    united.new_beyond({}, this->resident); // both of one model, or an exception here
}

void expansion::offer(int parent,
                      std::span<const std::pair<int32_t, double>> tokens_and_confidences,
                      const calibration & by) {
    if (parent != -1) {
        check_node(parent, tree.size());
    }
    const int depth = parent == -1 ? 1 : tree[parent].depth + 1;
    const double path = parent == -1 ? 1 : tree[parent].path;
    if (depth > limits.depth_max) {
        return;
    }
    for (const auto & [token, confidence] : tokens_and_confidences) {
        int n_children = 0;
        bool twice = false;
        for (const draft_node & other : tree) {
            if (other.parent == parent) {
                ++n_children;
                twice = twice || other.token == token;
            }
        }
        if (n_children >= limits.children_max) {
            return;
        }
        if (twice) {
            continue;
        }
        draft_node node;
        node.parent = parent;
        node.token = token;
        node.depth = depth;
        node.confidence = confidence;
        node.calibrated = by.calibrated(confidence, depth);
        node.path = path * node.calibrated;
        tree.push_back(std::move(node));
        n_admitted_children.push_back(0);
    }
}

bool expansion::parent_admitted(const draft_node & node) const {
    return node.parent == -1 || tree[node.parent].admitted;
}

// Limits only tighten while nodes are admitted: what does not fit now never will.
bool expansion::fits(const draft_node & node) const {
    const bool replaces_a_leaf = node.parent != -1 && n_admitted_children[node.parent] == 0;
    return n_admitted() < limits.nodes_max && leaves + (replaces_a_leaf ? 0 : 1) <= limits.leaves_max;
}

bool expansion::may_have_children(const draft_node & node) const {
    return node.depth < limits.depth_max && n_admitted() + 1 < limits.nodes_max;
}

bool expansion::pays(const draft_node & node, double cost) const {
    const double worth = node.path * costs.single_seconds;
    return worth > 0 && worth >= cost;
}

// Whether the node would be admitted on average, and then a child as likely given the node as the node is given its
// parent would gain what the draft's evaluation of the node costs.
bool expansion::child_pays(const draft_node & node, double routing_seconds) const {
    const double cost = costs.row_seconds + routing_seconds;
    const double child_worth = node.path * node.calibrated * costs.single_seconds;
    return may_have_children(node) && pays(node, cost) && child_worth >= cost + costs.draft_seconds;
}

// Of a node's new experts, on average; < 0: unknown.
double expansion::typical_seconds() const {
    if (new_nodes > 0) {
        return (costs.hit_seconds * new_hits + costs.miss_seconds * new_misses) / new_nodes;
    }
    return typical_hits < 0 ? -1 : costs.hit_seconds * typical_hits + costs.miss_seconds * typical_misses;
}

double expansion::admission_seconds(const draft_node & node) const {
    const auto fresh_experts = node.predicted.new_beyond(united, resident);
    return costs.row_seconds + costs.hit_seconds * fresh_experts.resident + costs.miss_seconds * fresh_experts.missing;
}

int expansion::next() const {
    const double routing_seconds = typical_seconds();
    int best = -1;
    for (int i = 0; i < static_cast<int>(tree.size()); ++i) {
        const draft_node & node = tree[i];
        if (node.evaluated || node.admitted || !parent_admitted(node) || !fits(node) ||
            !pays(node, costs.row_seconds + costs.draft_seconds)) {
            continue;
        }
        const bool left_to_finish = routing_seconds >= 0 && !child_pays(node, routing_seconds);
        if (!left_to_finish && (best == -1 || likelier(node, tree[best]))) {
            best = i;
        }
    }
    return best;
}

void expansion::evaluated(int node, expert_set predicted) {
    check_node(node, tree.size());
    predicted.new_beyond(united, resident); // of this model, or an exception before anything has changed
    tree[node].predicted = std::move(predicted);
    tree[node].evaluated = true;
    if (tree[node].admitted) { // by finish()
        united.unite(tree[node].predicted);
    }
    admit_evaluated();
}

void expansion::admit_evaluated() {
    while (true) {
        int best = -1;
        double most = -std::numeric_limits<double>::infinity();
        for (int i = 0; i < static_cast<int>(tree.size()); ++i) {
            const draft_node & node = tree[i];
            if (!node.evaluated || node.admitted || !parent_admitted(node) || !fits(node)) {
                continue;
            }
            const double cost = admission_seconds(node);
            const double gain = node.path * costs.single_seconds - cost;
            if (pays(node, cost) && (gain > most || (gain == most && likelier(node, tree[best])))) {
                best = i;
                most = gain;
            }
        }
        if (best == -1) {
            return;
        }
        const auto fresh_experts = tree[best].predicted.new_beyond(united, resident);
        new_hits += fresh_experts.resident;
        new_misses += fresh_experts.missing;
        ++new_nodes;
        united.unite(tree[best].predicted);
        admit(best);
        fresh.push_back(best);
    }
}

void expansion::admit(int node) {
    const int parent = tree[node].parent;
    tree[node].admitted = true;
    order.push_back(node);
    ++leaves;
    if (parent != -1 && n_admitted_children[parent]++ == 0) {
        --leaves;
    }
}

std::vector<int> expansion::take_admitted() {
    return std::exchange(fresh, {});
}

std::vector<int> expansion::finish() {
    std::vector<int> result;
    const double routing_seconds = typical_seconds();
    if (routing_seconds < 0) {
        return result;
    }
    while (true) {
        int best = -1;
        for (int i = 0; i < static_cast<int>(tree.size()); ++i) {
            const draft_node & node = tree[i];
            if (!node.evaluated && !node.admitted && parent_admitted(node) && fits(node) &&
                pays(node, costs.row_seconds + routing_seconds) && (best == -1 || likelier(node, tree[best]))) {
                best = i;
            }
        }
        if (best == -1) {
            return result;
        }
        admit(best);
        result.push_back(best);
    }
}

void expansion::set_typical(double hits, double misses) {
    if (std::isfinite(hits) && std::isfinite(misses) && hits >= 0 && misses >= 0) {
        typical_hits = hits;
        typical_misses = misses;
    }
}

const std::vector<draft_node> & expansion::nodes() const {
    return tree;
}

const std::vector<int> & expansion::admitted() const {
    return order;
}

int expansion::n_admitted() const {
    return static_cast<int>(order.size());
}

int expansion::n_leaves() const {
    return leaves;
}

const expert_set & expansion::covered() const {
    return united;
}

int expansion::n_new_hits() const {
    return new_hits;
}

int expansion::n_new_misses() const {
    return new_misses;
}

int expansion::n_new_nodes() const {
    return new_nodes;
}

} // namespace s2moe

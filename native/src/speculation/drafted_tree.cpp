#include "drafted_tree.h"

#include <algorithm>
#include <tuple>

namespace s2moe {

namespace {

constexpr int children_max = 4;

// Asks for each expert once in a step. What a node needs and nobody asked for is not what nobody needs: of a predicted
// set only the likeliest part is read ahead, and the rest may be the likeliest part of another node's.
class read_ahead {
  public:
    explicit read_ahead(const draft_surroundings & around) : around(around) {
    }

    void add(const expert_set & likely) {
        const expert_set & resident = around.resident();
        std::vector<s2moe_expert_id> missing;
        likely.for_each_beyond(asked, [&](int layer, int expert) {
            if (!resident.has(layer, expert)) {
                missing.push_back({layer, expert});
            }
        });
        asked.unite(likely);
        if (!missing.empty()) {
            around.read_ahead(missing);
        }
    }

  private:
    const draft_surroundings & around;
    expert_set asked;
};

} // namespace

drafted_tree draft_fixed(const draft_surroundings & around, int n_nodes, int depth, int width) {
    drafted_tree tree;
    tree.used = true;
    int n_evaluated = 1;
    const draft_view root = around.evaluate(-1, 0);
    expert_set needed = root.predicted;
    read_ahead ahead(around);
    around.pin(needed);
    ahead.add(root.likely);
    tree.predicted.push_back(root.predicted);
    for (int chain = 0; chain < width && chain < static_cast<int>(root.next.size()); ++chain) {
        int parent = -1;
        int evaluated_parent = 0;
        double path = 1;
        auto [token, confidence] = root.next[chain];
        for (int d = 1; d <= depth && static_cast<int>(tree.nodes.size()) < n_nodes; ++d) {
            path *= around.confidences.calibrated(confidence, d);
            tree.nodes.push_back({parent, token, d, path, confidence});
            ++tree.n_drafted;
            tree.predicted.emplace_back();
            parent = static_cast<int>(tree.nodes.size()) - 1;
            if (d == depth || static_cast<int>(tree.nodes.size()) == n_nodes) {
                break; // its own continuation is not wanted
            }
            const draft_view view = around.evaluate(evaluated_parent, token);
            evaluated_parent = n_evaluated++;
            needed.unite(view.predicted);
            around.pin(needed);
            ahead.add(view.likely);
            tree.predicted.back() = view.predicted;
            if (view.next.empty()) {
                break;
            }
            std::tie(token, confidence) = view.next.front();
        }
    }
    return tree;
}

drafted_tree
draft_adaptively(const draft_surroundings & around, const expansion_costs & costs, const adaptive_limits & limits) {
    drafted_tree tree;
    tree.used = true;
    std::vector<draft_view> views;    // of what was evaluated, in order
    std::vector<int> evaluation = {}; // of the expansion's nodes: index in `views`
    views.push_back(around.evaluate(-1, 0));
    const bool branches = limits.n_sequences > 1;
    expansion growing(costs,
                      {.nodes_max = limits.n_nodes,
                       .depth_max = std::min(limits.n_nodes, S2MOE_N_VERIFY_ROWS - 1),
                       .children_max = branches ? children_max : 1,
                       .leaves_max = limits.n_sequences,
                       .width = branches},
                      views[0].predicted,
                      around.resident());
    if (limits.typical_hits >= 0) {
        growing.set_typical(limits.typical_hits, limits.typical_misses);
    }
    read_ahead ahead(around);
    around.pin(views[0].predicted);
    ahead.add(views[0].likely);
    growing.offer(-1, views[0].next, around.confidences);
    int n_leaves_drafted = 1;
    std::vector<int> n_children(1, 0); // evaluated children by view
    for (int i = growing.next(); i >= 0 && static_cast<int>(views.size()) < limits.n_evaluations; i = growing.next()) {
        const draft_node node = growing.nodes()[i];
        const int parent = node.parent < 0 ? 0 : evaluation[node.parent];
        if (n_children[parent] > 0 && ++n_leaves_drafted > limits.n_sequences) {
            break;
        }
        ++n_children[parent];
        views.push_back(around.evaluate(parent, node.token));
        n_children.push_back(0);
        evaluation.resize(growing.nodes().size(), -1);
        evaluation[i] = static_cast<int>(views.size()) - 1;
        growing.evaluated(i, views.back().predicted);
        for (const int admitted : growing.take_admitted()) {
            around.pin(growing.covered());
            ahead.add(views[evaluation[admitted]].likely);
            growing.offer(admitted, views[evaluation[admitted]].next, around.confidences);
        }
        evaluation.resize(growing.nodes().size(), -1);
    }
    // the root is no draft
    tree.n_drafted = static_cast<int>(growing.finish().size() + views.size()) - 1;
    tree.predicted.push_back(views[0].predicted);
    std::vector<int> index(growing.nodes().size(), -1);
    for (const int i : growing.admitted()) {
        const draft_node & node = growing.nodes()[i];
        index[i] = static_cast<int>(tree.nodes.size());
        tree.nodes.push_back(
            {node.parent < 0 ? -1 : index[node.parent], node.token, node.depth, node.path, node.confidence});
        tree.predicted.push_back(node.predicted);
    }
    return tree;
}

} // namespace s2moe

// How a tree of drafts grows: what is evaluated behind what, which experts are read ahead, and the lengths of cascades.

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>

#include "check.h"
#include "speculation/cascade.h"
#include "speculation/drafted_tree.h"
#include "speculation/regime.h"

using namespace s2moe;

namespace {

constexpr int n_layers = 2;
constexpr int n_expert = 80;

using ids = std::vector<std::pair<int, int>>;

expert_set set_of(const ids & members) {
    expert_set result(n_layers, n_expert);
    for (const auto & [layer, expert] : members) {
        result.add(layer, expert);
    }
    return result;
}

// A model that is told by hand what it drafts, and takes down what is asked of it.
struct scene {
    std::map<int32_t, draft_view> views; // by token; 0: the root
    ids in_memory;
    std::vector<std::pair<int, int32_t>> evaluated; // parent, token
    std::vector<ids> read;                          // by call
    std::vector<std::pair<size_t, int>> pinned;     // evaluations before it, experts

    expert_set resident = set_of({});

    // `likely` comes first in `predicted`, too
    void says(int32_t token, const std::vector<std::pair<int32_t, double>> & next, const ids & likely, ids rest = {}) {
        rest.insert(rest.end(), likely.begin(), likely.end());
        views[token] = {next, set_of(rest), set_of(likely)};
    }

    draft_surroundings surroundings(const calibration & confidences) {
        return {.evaluate =
                    [this](int parent, int32_t token) {
                        CHECK(parent < static_cast<int>(evaluated.size()) && (parent >= 0) == !evaluated.empty());
                        evaluated.emplace_back(parent, parent < 0 ? 0 : token);
                        resident = set_of(in_memory);
                        return views.at(parent < 0 ? 0 : token);
                    },
                .resident = [this]() -> const expert_set & { return resident; },
                .pin = [this](const expert_set & needed) { pinned.emplace_back(evaluated.size(), needed.size()); },
                .read_ahead =
                    [this](std::span<const s2moe_expert_id> missing) {
                        ids asked;
                        for (const s2moe_expert_id & id : missing) {
                            asked.emplace_back(id.layer, id.expert);
                        }
                        CHECK(std::is_sorted(asked.begin(), asked.end()) && !asked.empty());
                        read.push_back(asked);
                    },
                .confidences = confidences};
    }
};

// A token takes a second, and nothing else costs anything to speak of.
const expansion_costs cheap = {
    .single_seconds = 1, .row_seconds = 1e-3, .hit_seconds = 1e-4, .miss_seconds = 1e-3, .draft_seconds = 1e-3};

// Two siblings below the root, and a child of each.
scene forked() {
    scene s;
    s.says(0, {{10, 0.6}, {11, 0.4}}, {{0, 1}, {1, 1}}, {{0, 7}, {1, 7}});
    s.says(10, {{20, 0.9}}, {{0, 7}, {0, 2}}, {{1, 8}}); // 7 is what the root ranks low
    s.says(11, {{21, 0.9}}, {{1, 8}, {0, 1}}, {{1, 9}}); // 8 is what its sibling ranks low, 1 was asked for
    s.says(20, {}, {{0, 7}, {1, 3}}, {{0, 70}});
    s.says(21, {}, {{0, 70}, {1, 9}}, {{0, 2}});
    s.in_memory = {{1, 3}};
    return s;
}

// What was predicted for one node, but not likely enough to be read, is read when it is likely for another.
void test_every_likely_expert_is_read_ahead_once() {
    const calibration confidences;
    scene s = forked();
    const drafted_tree tree =
        draft_adaptively(s.surroundings(confidences), cheap, {.n_nodes = 7, .n_evaluations = 100, .n_sequences = 8});
    CHECK(tree.used && tree.nodes.size() == 4 && tree.n_drafted == 4);
    // by probability: 10, then its child 20 (0.54), then 11 (0.4) and its child
    CHECK((s.evaluated == std::vector<std::pair<int, int32_t>>{{-1, 0}, {0, 10}, {1, 20}, {0, 11}, {3, 21}}));
    // the root, 10, 11 and 21; 20 adds nothing: 7 was asked for, and 3 is in memory
    CHECK((s.read == std::vector<ids>{{{0, 1}, {1, 1}}, {{0, 2}, {0, 7}}, {{1, 8}}, {{0, 70}, {1, 9}}}));

    scene fixed = forked();
    const drafted_tree chains = draft_fixed(fixed.surroundings(confidences), 7, 3, 2);
    CHECK(chains.used && chains.nodes.size() == 4 && fixed.evaluated == s.evaluated && fixed.read == s.read);
}

// A node whose experts are too dear is evaluated, but not verified, and nothing is read for it.
void test_nothing_is_read_ahead_for_what_is_not_admitted() {
    const calibration confidences;
    scene s;
    s.says(0, {{10, 0.5}}, {{0, 1}});
    s.says(10, {{20, 0.5}}, {{0, 2}}, {{1, 2}, {1, 3}});
    expansion_costs dear = cheap;
    dear.miss_seconds = 0.2;
    const drafted_tree tree =
        draft_adaptively(s.surroundings(confidences), dear, {.n_nodes = 7, .n_evaluations = 100, .n_sequences = 8});
    CHECK(tree.nodes.empty() && tree.used && tree.n_drafted == 1 && s.evaluated.size() == 2);
    CHECK((s.read == std::vector<ids>{{{0, 1}}}));
    CHECK(s.pinned.size() == 1);
}

// An expert that was in memory for one evaluation, and gone at the next.
void test_evicted_experts_are_read_ahead() {
    const calibration confidences;
    scene s;
    s.says(0, {{10, 0.9}}, {{0, 1}});
    s.says(10, {}, {{0, 2}});
    s.in_memory = {{0, 2}};
    draft_surroundings around = s.surroundings(confidences);
    around.evaluate = [&, evaluate = around.evaluate](int parent, int32_t token) {
        const draft_view view = evaluate(parent, token);
        s.in_memory.clear();
        return view;
    };
    draft_adaptively(around, cheap, {.n_nodes = 7, .n_evaluations = 100, .n_sequences = 8});
    CHECK((s.read == std::vector<ids>{{{0, 1}}, {{0, 2}}}));
}

void test_the_tree_keeps_who_is_whose_child() {
    const calibration confidences;
    scene s = forked();
    const drafted_tree tree =
        draft_adaptively(s.surroundings(confidences), cheap, {.n_nodes = 7, .n_evaluations = 100, .n_sequences = 8});
    const std::map<int32_t, int32_t> parents = {{10, 0}, {11, 0}, {20, 10}, {21, 11}};
    CHECK(tree.predicted.size() == 5 && tree.predicted[0] == s.views.at(0).predicted);
    for (size_t i = 0; i < tree.nodes.size(); ++i) {
        const verify_node & node = tree.nodes[i];
        CHECK(node.parent < static_cast<int>(i));
        CHECK((node.parent < 0 ? 0 : tree.nodes[node.parent].token) == parents.at(node.token));
        CHECK(node.depth == (node.token < 20 ? 1 : 2));
        CHECK(tree.predicted[i + 1] == s.views.at(node.token).predicted);
    }
    // what is pinned only grows, and before anything is evicted for the node
    for (size_t i = 1; i < s.pinned.size(); ++i) {
        CHECK(s.pinned[i].second >= s.pinned[i - 1].second);
    }
    CHECK(s.pinned.front().first == 1 && s.pinned.size() == 5);
}

void test_limits_of_a_tree() {
    const calibration confidences;
    for (const int n_nodes : {1, 2, 3}) {
        scene s = forked();
        const drafted_tree tree = draft_adaptively(
            s.surroundings(confidences), cheap, {.n_nodes = n_nodes, .n_evaluations = 100, .n_sequences = 8});
        CHECK(static_cast<int>(tree.nodes.size()) == n_nodes);
        scene fixed = forked();
        CHECK(static_cast<int>(draft_fixed(fixed.surroundings(confidences), n_nodes, 2, 2).nodes.size()) == n_nodes);
    }
    for (const int n_evaluations : {1, 2, 3}) {
        scene s = forked();
        draft_adaptively(
            s.surroundings(confidences), cheap, {.n_nodes = 7, .n_evaluations = n_evaluations, .n_sequences = 8});
        CHECK(static_cast<int>(s.evaluated.size()) == n_evaluations);
    }
    scene s = forked();
    const drafted_tree chain =
        draft_adaptively(s.surroundings(confidences), cheap, {.n_nodes = 7, .n_evaluations = 100, .n_sequences = 1});
    CHECK(chain.nodes.size() == 2 && chain.nodes[0].token == 10 && chain.nodes[1].parent == 0);
}

// ── cascade ──────────────────────────────────────────────────────────────────────────────────────

// Lengths of the coming n steps, each of which gives one token for each of its drafts.
std::vector<int> lengths_of(cascade & lengths, int n) {
    std::vector<int> result;
    for (int i = 0; i < n; ++i) {
        result.push_back(lengths.length());
        lengths.end_step(1 + lengths.length(), 1);
    }
    return result;
}

void test_cascades_test_each_length_once() {
    const std::map<int, std::vector<int>> expected = {{1, {0, 1}},
                                                      {2, {0, 1, 2}},
                                                      {3, {0, 1, 2, 3}},
                                                      {6, {0, 1, 2, 4, 6}},
                                                      {7, {0, 1, 2, 4, 7}},
                                                      {14, {0, 1, 2, 4, 7}}};
    for (const auto & [longest, tested] : expected) {
        cascade lengths;
        lengths.limit(longest);
        std::vector<int> first;
        for (const int length : tested) {
            first.insert(first.end(), 4, length);
        }
        first.push_back(tested.back()); // the best
        CHECK(lengths_of(lengths, static_cast<int>(first.size())) == first);
        lengths.limit(longest); // of another answer: goes on
        CHECK(lengths_of(lengths, 15) == std::vector<int>(15, tested.back()));
        CHECK(lengths.length() == 0); // tests again
    }
    cascade lengths;
    lengths_of(lengths, 20);
    CHECK(lengths.length() == 7);
    lengths.limit(2);
    CHECK(lengths.length() == 0);
}

// ── regimes ──────────────────────────────────────────────────────────────────────────────────────

// A client that tries out many settings does not take away what ordinary requests learnt.
void test_the_least_recently_used_regime_goes() {
    regimes known;
    known.of("ordinary").single_seconds = 1;
    for (int i = 0; i < 100; ++i) {
        known.of("experiment " + std::to_string(i)).single_seconds = 2;
        CHECK(known.of("ordinary").single_seconds == 1);
        CHECK(known.save().size() == std::min<size_t>(i + 2, regimes::n_max));
    }
    CHECK(known.of("experiment 99").single_seconds == 2);
    CHECK(known.of("experiment 84").single_seconds == 0); // gone, and known.of("experiment 85") with it
    for (size_t i = 0; i < regimes::n_max; ++i) {
        known.of(std::to_string(i));
    }
    CHECK(known.of("ordinary").single_seconds == 0);
}

void test_age_of_regimes_is_kept() {
    regimes first;
    for (size_t i = 0; i < regimes::n_max; ++i) {
        first.of(std::to_string(i)).single_seconds = static_cast<double>(i + 1);
    }
    first.of("0");
    const common_json state = first.save();
    regimes second;
    second.of("another").single_seconds = 1;
    second.load(state);
    CHECK(second.save().dump() == state.dump());
    second.of("new");
    CHECK(second.of("0").single_seconds == 1 && second.of("2").single_seconds == 3);
    CHECK(second.of("1").single_seconds == 0);
    regimes third;
    common_json many = state;
    many["17"] = state.at("5");
    many["18"] = state.at("6");
    third.load(many);
    CHECK(third.of("18").single_seconds == 7 && third.save().size() == regimes::n_max);
}

} // namespace

void test_drafted_tree() {
    test_every_likely_expert_is_read_ahead_once();
    test_nothing_is_read_ahead_for_what_is_not_admitted();
    test_evicted_experts_are_read_ahead();
    test_the_tree_keeps_who_is_whose_child();
    test_limits_of_a_tree();
    test_cascades_test_each_length_once();
    test_the_least_recently_used_regime_goes();
    test_age_of_regimes_is_kept();
}

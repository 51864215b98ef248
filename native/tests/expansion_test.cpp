// The expansion of the tree of drafts: against the rules written down a second time, as plainly as possible, on random
// models; and case by case.

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <stdexcept>

#include "check.h"
#include "expansion_reference.h"
#include "speculation/expansion.h"

using namespace s2moe;

namespace {

std::vector<int32_t> path_of(const expansion & tree, int node) {
    std::vector<int32_t> path;
    for (; node != -1; node = tree.nodes()[node].parent) {
        path.insert(path.begin(), tree.nodes()[node].token);
    }
    return path;
}

struct outcome {
    std::vector<std::vector<int32_t>> evaluations, admissions;
    int n_finished = 0;
};

outcome run(expansion & tree, const random_model & model, const setting & given) {
    outcome result;
    const calibration none;
    if (given.typical_hits >= 0) {
        tree.set_typical(given.typical_hits, given.typical_misses);
    }
    tree.offer(-1, model.next({}), none);
    for (int node = tree.next(); node != -1; node = tree.next()) {
        CHECK(tree.next() == node);
        const auto path = path_of(tree, node);
        result.evaluations.push_back(path);
        tree.evaluated(node, as_set(model.routing(path)));
        // continuations are offered after each admission; the order among several does not matter to the rules
        for (const int admitted : tree.take_admitted()) {
            tree.offer(admitted, model.next(path_of(tree, admitted)), none);
        }
        CHECK(tree.take_admitted().empty());
    }
    result.n_finished = static_cast<int>(tree.finish().size());
    for (const int node : tree.admitted()) {
        result.admissions.push_back(path_of(tree, node));
    }
    return result;
}

void check_invariants(const expansion & tree, const setting & given) {
    const auto & limits = given.limits;
    CHECK(tree.n_admitted() <= limits.nodes_max && tree.n_leaves() <= limits.leaves_max);
    std::map<int, int> children;
    int leaves = 0;
    for (const int node : tree.admitted()) {
        const draft_node & each = tree.nodes()[node];
        CHECK(each.admitted && each.depth <= limits.depth_max);
        CHECK(each.parent == -1 || tree.nodes()[each.parent].admitted);
        CHECK(++children[each.parent] <= (limits.width ? limits.children_max : 1));
        CHECK(!each.evaluated || each.predicted.new_beyond(tree.covered(), {}).missing == 0);
    }
    for (const int node : tree.admitted()) {
        leaves += children.contains(node) ? 0 : 1;
    }
    CHECK(leaves == tree.n_leaves());
}

void test_against_the_reference() {
    std::mt19937_64 random(11);
    const auto uniform = [&](double least, double most) {
        return std::uniform_real_distribution<double>(least, most)(random);
    };
    int n_nodes = 0;
    int n_finished = 0;
    int n_rejected = 0;
    for (int round = 0; round < 3'000; ++round) {
        const random_model model{random(), 1 + static_cast<int>(random() % 8)};
        setting given;
        given.costs = {1, uniform(0, 0.15), uniform(0, 0.02), uniform(0, 0.15), uniform(0, 0.3)};
        const auto limit = [&](int most) { return random() % 30 == 0 ? 0 : 1 + static_cast<int>(random() % most); };
        given.limits = {limit(8), limit(6), limit(4), limit(5), random() % 4 != 0};
        given.root = random_pairs(random, 6);
        given.resident = random_pairs(random, static_cast<int>(random() % 40));
        if (random() % 2 == 0) {
            given.typical_hits = uniform(0, 6);
            given.typical_misses = uniform(0, 3);
        }
        reference expected{model, given, {}, {}, {}, {}};
        expected.run();
        expansion tree(given.costs, given.limits, as_set(given.root), as_set(given.resident));
        const outcome actual = run(tree, model, given);
        CHECK(actual.evaluations == expected.evaluations);
        CHECK(actual.admissions == expected.admissions);
        CHECK(tree.covered() == as_set(expected.covered()));
        check_invariants(tree, given);
        n_nodes += tree.n_admitted();
        n_finished += actual.n_finished;
        n_rejected += static_cast<int>(actual.evaluations.size()) - tree.n_new_nodes();
    }
    CHECK(n_nodes > 3'000 && n_finished > 300 && n_rejected > 100); // the rounds were not idle
}

const calibration as_it_is;

expert_set set_of(const pairs & members) {
    return as_set(members);
}

void test_unknown_costs_draft_nothing() {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const double infinity = std::numeric_limits<double>::infinity();
    for (const expansion_costs & costs : {expansion_costs{},
                                          expansion_costs{-1, 0, 0, 0, 0},
                                          expansion_costs{nan, 0, 0, 0, 0},
                                          expansion_costs{infinity, 0, 0, 0, 0},
                                          expansion_costs{1, nan, 0, 0, 0},
                                          expansion_costs{1, 0, infinity, 0, 0}}) {
        expansion tree(costs, {}, set_of({}), set_of({}));
        tree.set_typical(0, 0);
        tree.offer(-1, continuations{{1, 1.0}}, as_it_is);
        CHECK(tree.next() == -1);
        tree.evaluated(0, set_of({}));
        CHECK(tree.n_admitted() == 0 && tree.finish().empty());
    }
    expansion tree({1, 0, 0, 0, 0}, {}, set_of({}), set_of({}));
    tree.offer(-1, continuations{{1, 0.0}, {2, nan}}, as_it_is); // worth nothing, however cheap
    CHECK(tree.next() == -1 && tree.finish().empty());
}

// A node that is too dear alone passes once a sibling has brought in the experts that it needs.
void test_shared_experts_are_paid_for_once() {
    expansion tree({1, 0.1, 0.01, 0.2, 0.05}, {}, set_of({{0, 0}}), set_of({{0, 0}}));
    tree.offer(-1, continuations{{1, 0.55}, {2, 0.45}}, as_it_is);
    CHECK(tree.next() == 0);
    tree.evaluated(0, set_of({{0, 1}, {0, 2}, {0, 3}})); // 0.1 + 3 * 0.2 > 0.55
    CHECK(tree.n_admitted() == 0);
    CHECK(tree.next() == 1);
    tree.evaluated(1, set_of({{0, 1}})); // 0.1 + 0.2; then the first costs 0.1 + 2 * 0.2
    CHECK(tree.take_admitted() == (std::vector<int>{1, 0}));
    CHECK(tree.n_new_misses() == 3 && tree.n_new_hits() == 0 && tree.n_new_nodes() == 2);
    CHECK(tree.n_leaves() == 2 && tree.covered().size() == 4);
}

// Of several that pass, the one that gains most comes first, though it was offered later and is less likely.
void test_the_best_bargain_is_admitted_first() {
    expansion tree({1, 0.1, 0, 0.1, 0.05}, {}, set_of({}), set_of({}));
    tree.offer(-1, continuations{{1, 0.42}, {2, 0.40}, {3, 0.35}}, as_it_is);
    tree.evaluated(tree.next(), set_of({{0, 1}, {0, 2}, {0, 3}, {0, 4}})); // 0.1 + 4 * 0.1, later 0.1 + 2 * 0.1
    tree.evaluated(tree.next(), set_of({{0, 1}, {0, 2}, {1, 3}, {1, 4}})); // the same
    CHECK(tree.n_admitted() == 0 && tree.next() == 2);
    tree.evaluated(2, set_of({{0, 1}, {0, 2}}));
    CHECK(tree.admitted() == (std::vector<int>{2, 0, 1}));

    expansion other({1, 0.1, 0, 0.1, 0.05}, {}, set_of({}), set_of({}));
    other.offer(-1, continuations{{1, 0.42}, {2, 0.40}, {3, 0.35}}, as_it_is);
    other.evaluated(other.next(), set_of({{0, 1}, {0, 2}, {0, 3}, {0, 4}})); // later 0.1 + 2 * 0.1
    other.evaluated(other.next(), set_of({{0, 1}, {0, 2}, {1, 3}, {1, 4}}));
    CHECK(other.n_admitted() == 0);
    other.evaluated(2, set_of({{0, 1}, {1, 3}})); // then 0.1 + 3 * 0.1 and 0.1 + 2 * 0.1
    CHECK(other.admitted() == (std::vector<int>{2, 1, 0}));
}

void test_residency_is_priced() {
    for (const bool resident : {false, true}) {
        expansion tree(
            {1, 0.1, 0.01, 0.3, 0.05}, {}, set_of({}), resident ? set_of({{1, 1}, {1, 2}}) : set_of({{1, 1}}));
        tree.offer(-1, continuations{{1, 0.4}}, as_it_is);
        tree.evaluated(tree.next(), set_of({{1, 1}, {1, 2}}));
        CHECK(tree.n_admitted() == (resident ? 1 : 0));
    }
}

void test_finish_takes_what_needs_no_evaluation() {
    const expansion_costs costs{1, 0.1, 0.01, 0.2, 0.3};
    expansion tree(costs, {}, set_of({}), set_of({{0, 1}, {0, 2}}));
    tree.offer(-1, continuations{{1, 0.6}, {2, 0.3}, {3, 0.1}}, as_it_is);
    tree.evaluated(tree.next(), set_of({{0, 1}, {0, 2}}));
    CHECK(tree.take_admitted() == std::vector<int>{0});
    CHECK(tree.next() == -1);                                      // 0.3 < 0.1 + 0.3
    CHECK(tree.finish() == std::vector<int>{1});                   // 0.3 >= 0.1 + 2 * 0.01 > 0.1
    CHECK(tree.take_admitted().empty() && tree.n_admitted() == 2); // nothing to prefetch for
    CHECK(!tree.nodes()[1].evaluated && tree.n_new_nodes() == 1);
    CHECK(tree.finish().empty());

    expansion unknown(costs, {}, set_of({}), set_of({}));
    unknown.offer(-1, continuations{{1, 0.35}}, as_it_is);
    CHECK(unknown.finish().empty());
    unknown.set_typical(-1, 0);
    unknown.set_typical(0, std::numeric_limits<double>::infinity());
    CHECK(unknown.finish().empty());
    unknown.set_typical(2, 2);
    CHECK(unknown.finish().empty()); // 0.1 + 0.02 + 0.4
    unknown.set_typical(2, 1);
    CHECK(unknown.finish() == std::vector<int>{0});
}

// What a draft's evaluation of a node can bring are children: none for the last row of the batch, and none worth it
// where they are too unlikely.
void test_a_node_without_gainful_children_is_not_evaluated() {
    const expansion_costs costs{1, 0.1, 0.01, 0.2, 0.3};
    for (const int nodes_max : {2, 3}) {
        expansion tree(costs, {.nodes_max = nodes_max}, set_of({}), set_of({{0, 1}, {0, 2}}));
        tree.offer(-1, continuations{{1, 0.9}}, as_it_is);
        tree.evaluated(tree.next(), set_of({{0, 1}, {0, 2}})); // routing costs 0.02
        tree.offer(0, continuations{{2, 0.9}}, as_it_is);
        CHECK(tree.next() == (nodes_max == 2 ? -1 : 1)); // 0.9 * 0.9 * 0.9 >= 0.1 + 0.02 + 0.3
        CHECK(tree.finish() == std::vector<int>{1});
    }
    for (const double confidence : {0.6, 0.7}) {
        expansion tree(costs, {}, set_of({}), set_of({}));
        tree.set_typical(2, 0);
        tree.offer(-1, continuations{{1, confidence}}, as_it_is);
        CHECK(tree.next() == (confidence * confidence < 0.1 + 0.02 + 0.3 ? -1 : 0));
        CHECK(tree.finish() == std::vector<int>{0});
    }
}

void test_offers() {
    expansion tree({1, 0, 0, 0, 0}, {.depth_max = 2, .children_max = 2}, set_of({}), set_of({}));
    tree.offer(-1, continuations{{1, 0.5}, {1, 0.4}}, as_it_is);
    CHECK(tree.nodes().size() == 1); // the same token twice
    tree.offer(-1, continuations{{1, 0.5}, {2, 0.3}, {3, 0.2}}, as_it_is);
    CHECK(tree.nodes().size() == 2 && tree.nodes()[1].token == 2);
    tree.offer(0, continuations{{4, 0.5}}, as_it_is);
    CHECK(tree.nodes()[2].path == 0.25 && tree.nodes()[2].depth == 2 && tree.nodes()[2].parent == 0);
    tree.offer(2, continuations{{5, 0.5}}, as_it_is); // too deep
    CHECK(tree.nodes().size() == 3);
    tree.evaluated(2, set_of({}));
    CHECK(tree.n_admitted() == 0); // its parent is not
    tree.evaluated(0, set_of({}));
    CHECK(tree.admitted() == (std::vector<int>{0, 2}));

    expansion chain({1, 0, 0, 0, 0}, {.width = false}, set_of({}), set_of({}));
    chain.offer(-1, continuations{{1, 0.5}, {2, 0.4}}, as_it_is);
    CHECK(chain.nodes().size() == 1);

    calibration calibration;
    for (int i = 0; i < 200; ++i) {
        calibration.observe(0.5, 1, false);
    }
    expansion doubtful({1, 0.1, 0, 0, 0.1}, {}, set_of({}), set_of({}));
    doubtful.offer(-1, continuations{{1, 0.5}}, calibration);
    const draft_node & node = doubtful.nodes()[0];
    CHECK(node.confidence == 0.5 && node.calibrated < 0.15 && node.path == node.calibrated);
    CHECK(doubtful.next() == -1);
}

template <typename E, typename F> void expect_throw(F && body) {
    try {
        body();
    } catch (const E &) {
        return;
    }
    CHECK(!"an exception");
}

void test_what_is_refused() {
    expansion tree({1, 0, 0, 0, 0}, {}, set_of({}), set_of({}));
    tree.offer(-1, continuations{{1, 0.5}}, as_it_is);
    for (const int node : {-2, 1}) {
        expect_throw<std::out_of_range>([&] { tree.offer(node, continuations{{1, 0.5}}, as_it_is); });
    }
    expect_throw<std::out_of_range>([&] { tree.evaluated(-1, set_of({})); });
    expect_throw<std::out_of_range>([&] { tree.evaluated(1, set_of({})); });
    expect_throw<std::invalid_argument>([&] { tree.evaluated(0, expert_set(7, 7)); });
    CHECK(!tree.nodes()[0].evaluated && tree.next() == 0);
    expect_throw<std::invalid_argument>([] { expansion({}, {}, expert_set(7, 7), set_of({})); });
}

} // namespace

void test_expansion() {
    test_unknown_costs_draft_nothing();
    test_shared_experts_are_paid_for_once();
    test_the_best_bargain_is_admitted_first();
    test_residency_is_priced();
    test_finish_takes_what_needs_no_evaluation();
    test_a_node_without_gainful_children_is_not_evaluated();
    test_offers();
    test_what_is_refused();
    test_against_the_reference();
}

// The algorithms of speculative decoding, without a model: sets of experts, calibration of confidences, and (in files
// of their own) the cost model, the expansion of the tree and its growth, and the controller.

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <stdexcept>

#include "check.h"
#include "speculation/calibration.h"
#include "speculation/expert_set.h"

using namespace s2moe;

void test_cost_model();
void test_drafted_tree();
void test_expansion();
void test_controller();

namespace {

template <typename E> void expect_throw(const std::function<void()> & body) {
    try {
        body();
    } catch (const E &) {
        return;
    }
    CHECK(!"an exception");
}

using pairs = std::set<std::pair<int, int>>;

pairs beyond(const expert_set & set, const expert_set & covered) {
    pairs result;
    std::pair<int, int> last{-1, -1};
    set.for_each_beyond(covered, [&](int layer, int expert) {
        CHECK(std::pair(layer, expert) > last);
        last = {layer, expert};
        result.insert(last);
    });
    return result;
}

// Against std::set, with numbers of experts that do and do not fill words.
void test_expert_sets() {
    std::mt19937 random(1);
    for (const int n_expert : {1, 60, 64, 65, 128, 160, 512}) {
        constexpr int n_layers = 5;
        expert_set sets[3];
        pairs expected[3];
        for (int i = 0; i < 3; ++i) {
            sets[i] = expert_set(n_layers, n_expert);
            for (int k = 0; k < 40; ++k) {
                const int layer = static_cast<int>(random() % n_layers);
                const int expert = static_cast<int>(random() % n_expert);
                sets[i].add(layer, expert);
                expected[i].insert({layer, expert});
            }
            CHECK(sets[i].size() == static_cast<int>(expected[i].size()));
            CHECK(sets[i].n_layers() == n_layers && sets[i].n_expert() == n_expert);
            CHECK(beyond(sets[i], {}) == expected[i]);
            for (int layer = -1; layer <= n_layers; ++layer) {
                for (int expert = -1; expert <= n_expert; ++expert) {
                    CHECK(sets[i].has(layer, expert) == expected[i].contains({layer, expert}));
                }
            }
        }
        pairs fresh;
        expert_set::counts counts;
        for (const auto & pair : expected[0]) {
            if (!expected[1].contains(pair)) {
                fresh.insert(pair);
                ++(expected[2].contains(pair) ? counts.resident : counts.missing);
            }
        }
        CHECK(beyond(sets[0], sets[1]) == fresh);
        const auto actual = sets[0].new_beyond(sets[1], sets[2]);
        CHECK(actual.resident == counts.resident && actual.missing == counts.missing);
        CHECK(sets[0].new_beyond({}, {}).missing == sets[0].size());

        expert_set all = sets[0];
        all.unite(sets[1]);
        pairs both = expected[0];
        both.insert(expected[1].begin(), expected[1].end());
        CHECK(beyond(all, {}) == both);
        CHECK(beyond(sets[0], {}) == expected[0]); // a value
        expert_set fresh_set;
        fresh_set.unite(sets[0]);
        CHECK(fresh_set == sets[0]);
        fresh_set.unite({});
        CHECK(fresh_set == sets[0]);
        all.clear();
        CHECK(all.size() == 0 && all.n_expert() == n_expert);
    }
}

void test_expert_sets_refuse_what_is_not_there() {
    expert_set set(2, 8);
    for (const auto & [layer, expert] : {std::pair(-1, 0), {2, 0}, {0, -1}, {0, 8}}) {
        expect_throw<std::out_of_range>([&, l = layer, e = expert] { set.add(l, e); });
    }
    expect_throw<std::out_of_range>([] { expert_set().add(0, 0); });
    expect_throw<std::invalid_argument>([] { expert_set(-1, 8); });
    expect_throw<std::invalid_argument>([] { expert_set(8, -1); });
    const expert_set other(4, 4);
    expect_throw<std::invalid_argument>([&] { set.unite(other); });
    expect_throw<std::invalid_argument>([&] { set.new_beyond(other, set); });
    expect_throw<std::invalid_argument>([&] { set.new_beyond(set, other); });
    expect_throw<std::invalid_argument>([&] { set.for_each_beyond(other, [](int, int) {}); });
    CHECK(set.size() == 0);
}

void expect_monotone(const calibration & calibration) {
    for (int depth = 1; depth <= 9; ++depth) {
        double last = 0;
        for (int i = 0; i <= 1'000; ++i) {
            const double value = calibration.calibrated(i / 1'000.0, depth);
            CHECK(value >= last - 1e-12 && value <= 1);
            last = value;
        }
    }
}

void test_calibration_begins_with_the_confidence_itself() {
    const calibration calibration;
    for (const double confidence : {0.0, 0.001, 0.05, 0.3, 0.5, 0.77, 0.999, 1.0}) {
        for (const int depth : {-3, 0, 1, 5, 100}) {
            CHECK(std::abs(calibration.calibrated(confidence, depth) - confidence) < 1e-12);
        }
    }
    CHECK(calibration.calibrated(-1, 1) == 0 && calibration.calibrated(2, 1) == 1);
    CHECK(calibration.calibrated(std::numeric_limits<double>::quiet_NaN(), 1) == 0);
}

// The draft is over-confident: c is accepted with probability c * c, and less so below depth 3.
void test_calibration_learns_acceptance() {
    const auto truth = [](double confidence, int depth) { return confidence * confidence * (depth <= 3 ? 1 : 0.6); };
    std::mt19937_64 random(5);
    std::uniform_real_distribution<double> uniform(0, 1);
    calibration calibration;
    double worst = 0;
    double sum = 0;
    int n = 0;
    for (int i = 0; i < 40'000; ++i) {
        const int depth = 1 + static_cast<int>(random() % 5);
        const double confidence = uniform(random);
        if (i >= 20'000 && i % 10 == 0) {
            const double error = std::abs(calibration.calibrated(confidence, depth) - truth(confidence, depth));
            worst = std::max(worst, error);
            sum += error;
            ++n;
        }
        calibration.observe(confidence, depth, uniform(random) < truth(confidence, depth));
    }
    CHECK(worst < 0.25 && sum / n < 0.05);
    expect_monotone(calibration);
}

void test_calibration_shrinks_towards_the_confidence() {
    calibration calibration;
    calibration.observe(0.95, 1, false);
    CHECK(calibration.calibrated(0.95, 1) > 0.8 && calibration.calibrated(0.95, 1) < 0.95);
    for (int i = 0; i < 20; ++i) {
        calibration.observe(0.95, 1, false);
    }
    const double after_21 = calibration.calibrated(0.95, 1);
    CHECK(after_21 > 0.4 && after_21 < 0.6);            // as much the confidence as what was seen
    CHECK(calibration.calibrated(0.95, 4) >= after_21); // a depth never seen takes it over
    CHECK(calibration.calibrated(0.95, 4) < 0.75);
    for (int i = 0; i < 100; ++i) {
        calibration.observe(0.95, 4, true);
    }
    CHECK(calibration.calibrated(0.95, 4) > 0.85 && calibration.calibrated(0.95, 1) < after_21 + 0.2);
    CHECK(std::abs(calibration.calibrated(0.05, 1) - 0.05) < 1e-12);
}

void test_calibration_forgets() {
    calibration calibration;
    for (int i = 0; i < 10'000; ++i) {
        calibration.observe(0.55, 1, false);
    }
    CHECK(calibration.calibrated(0.55, 1) < 0.05);
    for (int i = 0; i < 2'000; ++i) {
        calibration.observe(0.55, 1, true);
    }
    CHECK(std::abs(calibration.calibrated(0.55, 1) - 0.5) < 0.05); // one half-life
}

void test_calibration_is_monotone_even_where_acceptance_is_not() {
    std::mt19937_64 random(6);
    for (int round = 0; round < 20; ++round) {
        calibration calibration;
        for (int i = 0; i < 500; ++i) {
            const double confidence = static_cast<double>(random() % 1'001) / 1'000;
            const bool accepted = (static_cast<int>(confidence * 10) * 7 + round) % 3 == 0;
            calibration.observe(confidence, 1 + static_cast<int>(random() % 3), accepted);
        }
        expect_monotone(calibration);
    }
}

void test_calibration_state() {
    calibration first;
    for (int i = 0; i < 300; ++i) {
        first.observe((i % 37) / 36.0, 1 + i % 9, i % 3 == 0);
    }
    const std::vector<double> state = first.save();
    calibration second;
    CHECK(second.load(state) && second.save() == state);
    CHECK(second.calibrated(0.4, 2) == first.calibrated(0.4, 2));
    CHECK(!second.load({}) && !second.load(std::vector<double>(state.size() - 1, 1)));
    for (const double bad : {-1.0, 1e9, std::numeric_limits<double>::quiet_NaN()}) {
        for (size_t i = 0; i < 4; ++i) { // version, n, confidence, accepted
            auto changed = state;
            changed[i] = bad;
            CHECK(!second.load(changed));
        }
    }
    CHECK(second.save() == state);
}

} // namespace

int main() {
    test_expert_sets();
    test_expert_sets_refuse_what_is_not_there();
    test_calibration_begins_with_the_confidence_itself();
    test_calibration_learns_acceptance();
    test_calibration_shrinks_towards_the_confidence();
    test_calibration_forgets();
    test_calibration_is_monotone_even_where_acceptance_is_not();
    test_calibration_state();
    test_expansion();
    test_drafted_tree();
    test_controller();
    test_cost_model();
    return 0;
}

// The cost model: against least squares computed another way, on workloads like real ones, and on hostile ones.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>

#include "check.h"
#include "speculation/cost_model.h"

using namespace s2moe;

namespace {

using coefficients = std::array<double, 4>;

double seconds_of(const coefficients & c, const work_counts & work) {
    return c[0] + c[1] * work.rows + c[2] * work.hits + c[3] * work.misses;
}

// Seconds: 4 ms fixed, 1.5 ms a row, 45 us an expert, 1.4 ms a read.
constexpr coefficients machine{4e-3, 1.5e-3, 45e-6, 1.4e-3};

struct workload {
    std::mt19937_64 random{7};

    double uniform(double least, double most) {
        return std::uniform_real_distribution<double>(least, most)(random);
    }

    double normal() {
        return std::normal_distribution<double>()(random);
    }

    // 1 to 8 rows of a model with 240 experts a token: distinct experts grow slower than rows, a share is missing.
    work_counts next() {
        work_counts work;
        work.rows = static_cast<int>(uniform(1, 9));
        const double experts = 240 * std::pow(work.rows, 0.62) * uniform(0.9, 1.1);
        const double missing = std::min(400.0, experts * uniform(0, 0.45));
        work.misses = static_cast<int>(missing);
        work.hits = std::clamp(static_cast<int>(experts - missing), 60, 900);
        return work;
    }
};

bool close(double a, double b, double tolerance) {
    return std::abs(a - b) <= tolerance * std::abs(b);
}

bool equal(const cost_model::fit & fit, const coefficients & c, double tolerance) {
    return close(fit.intercept, c[0], tolerance) && close(fit.row, c[1], tolerance) &&
           close(fit.hit, c[2], tolerance) && close(fit.miss, c[3], tolerance);
}

void test_before_anything_is_known() {
    cost_model model;
    CHECK(model.predict({8, 900, 400}) == 0 && model.marginal({1, 10, 10}) == 0);
    CHECK(!model.ready() && model.quality().n == 0 && model.samples().empty());
    for (const double bad :
         {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        model.observe({1, 1, 1}, bad);
    }
    model.observe({0, 1, 1}, 1);
    model.observe({1, -1, 1}, 1);
    model.observe({1, 1, -1}, 1);
    CHECK(model.n_observed() == 0 && model.predict({}) == 0);
    model.observe({1, 240, 12}, 0.05);
    CHECK(close(model.predict({1, 240, 12}), 0.05, 1e-9));
    CHECK(model.predict({2, 300, 20}) > 0.05 && !model.ready());
}

void test_ready_needs_several_widths() {
    workload load;
    cost_model model;
    for (int i = 0; i < 40; ++i) {
        model.observe({1, 200 + i, i}, seconds_of(machine, {1, 200 + i, i}));
        CHECK(!model.ready());
    }
    for (int i = 0; i < 4; ++i) {
        CHECK(!model.ready());
        model.observe({4, 500 + i, i}, seconds_of(machine, {4, 500 + i, i}));
    }
    CHECK(model.ready());
}

// Solves the weighted least-squares problem by coordinate descent among coefficients >= 0.
coefficients descend(const std::vector<std::array<double, 5>> & rows) {
    std::array<std::array<double, 5>, 5> gram{};
    std::array<double, 4> scale{};
    for (const auto & row : rows) {
        for (size_t i = 0; i < 4; ++i) {
            scale[i] += row[i] * row[i];
        }
    }
    for (const auto & row : rows) {
        for (size_t i = 0; i < 5; ++i) {
            for (size_t j = 0; j < 5; ++j) {
                const double left = i < 4 ? row[i] / std::sqrt(scale[i]) : row[i];
                const double right = j < 4 ? row[j] / std::sqrt(scale[j]) : row[j];
                gram[i][j] += left * right;
            }
        }
    }
    coefficients c{};
    for (int sweep = 0; sweep < 20'000; ++sweep) {
        for (size_t i = 0; i < 4; ++i) {
            double rest = gram[i][4];
            for (size_t j = 0; j < 4; ++j) {
                rest -= j == i ? 0 : gram[i][j] * c[j];
            }
            c[i] = std::max(0.0, rest / gram[i][i]);
        }
    }
    for (size_t i = 0; i < 4; ++i) {
        c[i] /= std::sqrt(scale[i]);
    }
    return c;
}

// `truth` may have negative coefficients: the fit must then be the best one without.
void expect_least_squares(const coefficients & truth) {
    workload load;
    cost_model model(1);
    std::vector<std::array<double, 5>> rows;
    double first = 0;
    for (int i = 0; i < 3'000; ++i) {
        const work_counts work = load.next();
        double seconds = seconds_of(truth, work);
        first = i == 0 ? seconds : first;
        seconds += i == 0 ? 0 : load.uniform(-0.05, 0.05) * std::sqrt(seconds * first);
        const double weight = std::sqrt((i == 0 ? seconds : model.predict(work)) * first);
        model.observe(work, seconds);
        rows.push_back({1 / weight, work.rows / weight, work.hits / weight, work.misses / weight, seconds / weight});
    }
    const coefficients expected = descend(rows);
    const cost_model::fit fit = model.quality();
    const coefficients actual{fit.intercept, fit.row, fit.hit, fit.miss};
    for (size_t i = 0; i < 4; ++i) {
        CHECK(actual[i] >= 0);
        CHECK(std::abs(actual[i] - expected[i]) <= 2e-2 * std::abs(truth[i]) + 1e-9);
    }
    for (int i = 0; i < 100; ++i) {
        const work_counts work = load.next();
        CHECK(close(model.predict(work), seconds_of(expected, work), 1e-3)); // what is left is the prior
    }
}

void test_without_noise_the_coefficients_are_found() {
    workload load;
    cost_model model;
    for (int i = 0; i < 500; ++i) {
        const work_counts work = load.next();
        model.observe(work, seconds_of(machine, work));
    }
    const cost_model::fit fit = model.quality();
    CHECK(equal(fit, machine, 0.12)); // fixed part, rows and hits nearly grow together
    CHECK(fit.n == 256 && fit.r2 > 0.9999 && fit.mape < 2e-3);
    CHECK(close(model.marginal({2, 200, 30}), 2 * machine[1] + 200 * machine[2] + 30 * machine[3], 0.01));
    CHECK(model.marginal({0, 0, 0}) == 0 && model.marginal({-5, 0, 0}) == 0);
}

// Noise of 3 %, and a drive whose speed swings by 30 % over 500 evaluations.
void test_a_drifting_drive_is_followed() {
    for (const uint64_t seed : {1, 2, 3, 4}) {
        workload load{std::mt19937_64(seed)};
        cost_model model;
        for (int i = 0; i < 3'000; ++i) {
            const work_counts work = load.next();
            coefficients now = machine;
            const double phase = std::abs(static_cast<double>(i % 1'000) - 500) / 500;
            now[3] *= 1 + 0.3 * phase;
            model.observe(work, seconds_of(now, work) * (1 + 0.03 * load.normal()));
            if (i >= 300 && i % 100 == 0) {
                const cost_model::fit fit = model.quality();
                CHECK(fit.r2 >= 0.95);
                CHECK(fit.mape <= 0.05);
            }
        }
    }
}

void test_a_stall_spoils_nothing() {
    for (const bool first : {false, true}) {
        workload load;
        cost_model model;
        if (first) {
            model.observe({1, 240, 0}, 3);
        }
        for (int i = 0; i < 200; ++i) {
            const work_counts work = load.next();
            model.observe(work, seconds_of(machine, work) * (1 + 0.03 * load.normal()));
        }
        const work_counts work{5, 600, 100};
        CHECK(close(model.predict(work), seconds_of(machine, work), 0.05));
        const double before = model.predict(work);
        model.observe(work, 100 * before);
        CHECK(close(model.predict(work), before, 0.05));
    }
}

void test_a_change_that_lasts_is_followed() {
    workload load;
    cost_model model;
    coefficients now = machine;
    for (int i = 0; i < 340; ++i) {
        if (i == 300) {
            now[3] *= 4;
        }
        const work_counts work = load.next();
        model.observe(work, seconds_of(now, work) * (1 + 0.03 * load.normal()));
    }
    CHECK(close(model.quality().miss, now[3], 0.15));
    CHECK(close(model.predict({5, 600, 100}), seconds_of(now, {5, 600, 100}), 0.08));
}

void test_single_rows_do_not_wash_out_batches() {
    constexpr coefficients wide{4e-3, 12e-3, 45e-6, 1.4e-3}; // rows dearer than the prior has it
    workload load;
    cost_model model;
    for (int i = 0; i < 300; ++i) {
        const work_counts work = load.next();
        model.observe(work, seconds_of(wide, work) * (1 + 0.02 * load.normal()));
    }
    for (int i = 0; i < 20'000; ++i) {
        const work_counts work{1, 180 + static_cast<int>(load.uniform(0, 60)), static_cast<int>(load.uniform(0, 30))};
        model.observe(work, seconds_of(wide, work) * (1 + 0.02 * load.normal()));
    }
    for (const work_counts & work : {work_counts{1, 220, 10}, work_counts{4, 500, 40}, work_counts{8, 700, 200}}) {
        CHECK(close(model.predict(work), seconds_of(wide, work), 0.1));
    }
}

void test_a_million_updates() {
    workload load;
    cost_model model;
    for (int i = 0; i < 1'000'000; ++i) {
        work_counts work{1, 240, 0}; // nothing varies
        if (i / 100'000 % 3 == 1) {
            work.rows = 1 + i % 4; // all vary together
            work.hits = 240 * work.rows;
            work.misses = 10 * work.rows;
        } else if (i / 100'000 % 3 == 2) {
            work = load.next();
        }
        model.observe(work, seconds_of(machine, work) * load.uniform(0.95, 1.05));
        if (i % 1'000 == 0) {
            CHECK(close(model.predict(work), seconds_of(machine, work), 0.1));
            const cost_model::fit fit = model.quality();
            CHECK(fit.intercept >= 0 && fit.row >= 0 && fit.hit >= 0 && fit.miss >= 0 && std::isfinite(fit.r2));
        }
    }
    for (int i = 0; i < 300; ++i) {
        const work_counts work = load.next();
        model.observe(work, seconds_of(machine, work));
    }
    CHECK(equal(model.quality(), machine, 0.12));
}

void test_samples_are_the_last_ones_in_order() {
    cost_model model;
    for (int i = 1; i <= 300; ++i) {
        model.observe({1, i, 0}, i);
        const auto samples = model.samples();
        CHECK(static_cast<int>(samples.size()) == std::min(i - 1, 256));
        for (size_t k = 0; k < samples.size(); ++k) {
            CHECK(samples[k].second == i - static_cast<double>(samples.size()) + 1 + k);
        }
    }
    const double predicted = model.predict({2, 7, 1});
    model.observe({2, 7, 1}, 5);
    CHECK(model.samples().back() == std::pair(predicted, 5.0));
}

void test_state() {
    workload load;
    cost_model model;
    cost_model copy;
    CHECK(copy.load(model.save()) && copy.predict({}) == 0);
    for (int i = 0; i < 100; ++i) {
        const work_counts work = load.next();
        model.observe(work, seconds_of(machine, work) * (1 + 0.1 * load.normal()));
    }
    const std::vector<double> state = model.save();
    CHECK(copy.load(state) && copy.save() == state && copy.ready());
    for (int i = 0; i < 50; ++i) {
        const work_counts work = load.next();
        CHECK(copy.predict(work) == model.predict(work));
        copy.observe(work, 0.1);
        model.observe(work, 0.1);
    }
    const std::vector<double> kept = copy.save();
    CHECK(!copy.load({}));
    for (size_t i = 0; i < state.size(); ++i) {
        auto bad = state;
        bad[i] = std::numeric_limits<double>::quiet_NaN();
        CHECK(!copy.load(bad));
    }
    for (const size_t i :
         {0, 1, 4, 5, 6, 10, 15}) { // version, count, reference, residual, unit, sums of the first kind
        auto bad = state;
        bad[i] = -1;
        CHECK(!copy.load(bad));
    }
    auto longer = state;
    longer.push_back(0);
    CHECK(!copy.load(longer));
    CHECK(copy.save() == kept);
}

} // namespace

void test_cost_model() {
    test_before_anything_is_known();
    test_ready_needs_several_widths();
    expect_least_squares(machine);
    expect_least_squares({4e-3, 1.5e-3, 45e-6, 0});
    expect_least_squares({40e-3, -3e-3, 60e-6, 1e-3});
    expect_least_squares({-3e-3, 6e-3, 60e-6, 1e-3});
    test_without_noise_the_coefficients_are_found();
    test_a_drifting_drive_is_followed();
    test_a_stall_spoils_nothing();
    test_a_change_that_lasts_is_followed();
    test_single_rows_do_not_wash_out_batches();
    test_samples_are_the_last_ones_in_order();
    test_state();
    test_a_million_updates();
}

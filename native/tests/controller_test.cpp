// The controller in simulated worlds, where drafting pays, does not, or begins to.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "check.h"
#include "speculation/controller.h"

using namespace s2moe;

namespace {

// A plain token takes a second; a step that drafts yields 1 to 4 tokens, at `speed` tokens a second. `scatter`: of a
// step's duration; `bursts`: its duration does not follow the number of its tokens, as in reality.
struct world {
    std::function<double(double tokens)> speed;
    double scatter = 0.1;
    bool bursts = false;
    std::mt19937_64 random{3};

    double n_tokens = 0, total_seconds = 0, drafted_tokens = 0;
    double ideal_seconds = 0; // at the better of the two speeds
    int longest_probe = 0, n_drafts_on_end = 0;

    void step(controller & control) {
        std::normal_distribution<double> normal(0, scatter);
        const bool draft = control.begin_step();
        if (control.current() == controller::state::probing) {
            longest_probe = std::max(longest_probe, ++n_drafts_on_end);
        } else {
            n_drafts_on_end = 0;
        }
        const int n = draft ? 1 + static_cast<int>(random() % 4) : 1;
        const double pace = speed(n_tokens);
        const double work = draft ? (bursts ? 2.5 : n) / pace : 1;
        const double seconds = work * std::max(0.2, 1 + normal(random));
        control.end_step(draft, n, seconds);
        n_tokens += n;
        drafted_tokens += draft ? n : 0;
        total_seconds += seconds;
        ideal_seconds += n / std::max(1.0, pace);
    }

    void run(controller & control, double tokens) {
        for (const double end = n_tokens + tokens; n_tokens < end;) {
            step(control);
        }
    }
};

world constant(double speed, uint64_t seed, bool bursts = false) {
    world result{[speed](double) { return speed; }};
    result.random.seed(seed);
    result.bursts = bursts;
    return result;
}

template <typename F> double mean_over_seeds(F && f, double * worst = nullptr) {
    constexpr int n = 40;
    double sum = 0;
    for (int seed = 1; seed <= n; ++seed) {
        const double value = f(seed);
        sum += value / n;
        if (worst != nullptr) {
            *worst = std::max(*worst, value);
        }
    }
    return sum;
}

void test_losing_worlds_cost_two_percent_at_most() {
    for (const double speed : {0.7, 0.95, 0.3}) {
        double worst = 0;
        const double mean = mean_over_seeds(
            [&](int seed) {
                controller control;
                world w = constant(speed, seed);
                w.run(control, 2'000);
                CHECK(w.longest_probe <= 3);
                CHECK(control.n_pauses() >= 1 && control.n_probes() >= 1);
                return w.total_seconds / w.n_tokens;
            },
            &worst);
        CHECK(mean < (speed < 0.5 ? 1.035 : 1.01) && worst < (speed < 0.5 ? 1.05 : 1.02));
    }
}

void test_winning_worlds_keep_drafting() {
    for (const double speed : {1.5, 1.05}) {
        double worst = 0;
        mean_over_seeds(
            [&](int seed) {
                controller control;
                world w = constant(speed, seed);
                w.run(control, 2'000);
                return w.total_seconds / w.n_tokens * speed;
            },
            &worst);
        CHECK(worst < 1 / 0.97);
    }
}

// With as many tokens a step as luck has it, means are known less well.
void test_bursts() {
    for (const double speed : {0.7, 0.95, 1.05, 1.5}) {
        const double mean = mean_over_seeds([&](int seed) {
            controller control;
            world w = constant(speed, seed, true);
            w.run(control, 5'000);
            return w.total_seconds / w.n_tokens * std::max(1.0, speed);
        });
        CHECK(mean < 1.02);
    }
}

void test_changes_are_followed() {
    for (const auto & [before, after] : {std::pair(1.5, 0.7), {0.7, 1.5}, {1.05, 0.95}, {0.95, 1.05}}) {
        const double mean = mean_over_seeds([&, before = before, after = after](int seed) {
            controller control;
            world w = constant(1, seed);
            w.speed = [=](double tokens) { return tokens < 2'000 ? before : after; };
            w.run(control, 4'000);
            return w.total_seconds / w.ideal_seconds;
        });
        CHECK(mean < 1.03);
    }
}

using state = controller::state;

// A drafting step that yields two tokens at this many seconds each, or a plain one of a second.
bool steady_step(controller & control, double seconds_per_token) {
    const bool draft = control.begin_step();
    control.end_step(draft, draft ? 2 : 1, draft ? 2 * seconds_per_token : 1);
    return draft;
}

void test_while_drafting_pays_some_steps_are_plain() {
    controller control;
    CHECK(control.current() == state::drafting && std::strcmp(control.name(), "drafting") == 0);
    CHECK(control.drafting_seconds() == 0 && control.plain_seconds() == 0);
    CHECK(!control.begin_step()); // to know what a plain step takes
    CHECK(!control.begin_step()); // the step failed
    for (int i = 0; i < 200; ++i) {
        steady_step(control, 0.5);
    }
    int n_plain = 0;
    for (int i = 0; i < 320; ++i) {
        n_plain += steady_step(control, 0.5) ? 0 : 1;
    }
    CHECK(n_plain == 10);
    CHECK(control.n_pauses() == 0 && control.n_probes() == 0);
    CHECK(std::abs(control.drafting_seconds() - 0.5) < 1e-9 && std::abs(control.plain_seconds() - 1) < 1e-9);
}

void test_pauses_double_and_are_reset() {
    controller control;
    while (control.current() == state::drafting) {
        steady_step(control, 1.5);
    }
    CHECK(control.n_pauses() == 1 && std::strcmp(control.name(), "paused") == 0);
    for (const int expected : {32, 64, 128, 256, 512, 1024, 1024}) {
        for (int i = 0; i < expected; ++i) {
            CHECK(!steady_step(control, 1.5));
        }
        int n_drafts = 0;
        do {
            CHECK(steady_step(control, 1.5));
            ++n_drafts;
        } while (control.current() == state::probing);
        CHECK(n_drafts <= 3 && control.current() == state::paused);
    }
    CHECK(control.n_probes() == 7 && control.n_pauses() == 1);
    for (int i = 0; i < 1'024; ++i) {
        CHECK(!steady_step(control, 0.5));
    }
    CHECK(control.begin_step() && std::strcmp(control.name(), "probing") == 0);
    for (int i = 0; i < 3; ++i) {
        CHECK(steady_step(control, 0.5));
    }
    CHECK(std::abs(control.drafting_seconds() - 0.5) < 1e-9); // what was before the pause no longer counts
    for (int i = 0; i < 40; ++i) {
        CHECK(control.current() == state::drafting); // one good comparison is enough
        steady_step(control, 0.5);
    }
    int n_steps = 0;
    for (; control.current() == state::drafting; ++n_steps) {
        steady_step(control, 3);
    }
    CHECK(n_steps < 16 && control.n_pauses() == 2);
    for (int i = 0; i < 32; ++i) {
        CHECK(!steady_step(control, 3));
    }
    CHECK(control.begin_step());
}

void test_long_success_does_not_hide_a_change() {
    controller control;
    for (int i = 0; i < 1'000; ++i) {
        steady_step(control, 0.6);
    }
    int n_steps = 0;
    for (; control.current() == state::drafting; ++n_steps) {
        steady_step(control, 1.5);
    }
    CHECK(n_steps < 16);
}

void test_a_dear_probe_ends_at_once() {
    controller control;
    while (control.current() != state::probing) {
        steady_step(control, 1.5);
        if (control.current() == state::paused && control.begin_step()) {
            break;
        }
    }
    control.end_step(true, 1, 4);
    CHECK(control.current() == state::paused && control.n_probes() == 1);
}

// A probe in which nothing can be drafted costs nothing and goes on.
void test_steps_without_drafts_are_plain() {
    controller control;
    while (control.current() == state::drafting) {
        steady_step(control, 1.5);
    }
    while (!control.begin_step()) {
        control.end_step(false, 1, 1);
    }
    for (int i = 0; i < 10; ++i) {
        CHECK(control.begin_step());
        control.end_step(false, 1, 2);
        CHECK(control.current() == state::probing);
    }
    CHECK(control.n_probes() == 1 && control.plain_seconds() > 1);
}

void test_a_stall_decides_nothing() {
    for (const bool stalled_draft : {true, false}) {
        controller control;
        for (int i = 0; i < 100; ++i) {
            steady_step(control, 0.6);
        }
        bool done = false;
        while (!done) {
            const bool draft = control.begin_step();
            done = draft == stalled_draft;
            control.end_step(draft, draft ? 2 : 1, done ? 1'000 : draft ? 1.2 : 1);
        }
        CHECK(control.current() == state::drafting && control.drafting_seconds() < control.plain_seconds());
        CHECK(control.plain_seconds() < 1.5);
    }
}

void test_impossible_steps_are_ignored() {
    controller control;
    for (int i = 0; i < 100; ++i) {
        steady_step(control, 0.5);
    }
    const std::vector<double> before = control.save();
    control.end_step(true, 0, 1);
    control.end_step(true, -1, 1);
    for (const double seconds :
         {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        control.end_step(true, 1, seconds);
        control.end_step(false, 1, seconds);
    }
    CHECK(control.save() == before);
}

// Costs that rule drafting out may be wrong: every 1,024 tokens it is tried all the same.
void test_what_is_ruled_out_is_probed_rarely() {
    controller control;
    for (int i = 0; i < 100; ++i) {
        steady_step(control, 0.5);
    }
    CHECK(control.current() == state::drafting && !control.is_ruled_out());
    const auto idle_step = [&](double seconds_per_token) {
        const bool draft = control.begin_step(false);
        CHECK(control.is_ruled_out());
        CHECK(control.current() == (draft ? state::probing : state::paused));
        control.end_step(draft, draft ? 2 : 1, draft ? 2 * seconds_per_token : 1);
        return draft;
    };
    for (int round = 0; round < 3; ++round) {
        for (int i = 0; i < 1'024; ++i) {
            CHECK(!idle_step(1.1));
        }
        if (round == 1) {
            CHECK(!controller().begin_step(false)); // as ever
            controller copy;
            CHECK(copy.load(control.save()) && copy.begin_step(false)); // also after a restart
        }
        CHECK(control.begin_step(false) && control.begin_step(false)); // the step failed
        for (int i = 0; i < 3; ++i) {
            CHECK(idle_step(1.1));
        }
        CHECK(std::strcmp(control.name(), "paused") == 0);
    }
    for (int i = 0; i < 1'024; ++i) {
        CHECK(!idle_step(1));
    }
    CHECK(idle_step(2) && control.current() == state::paused); // dear ones end at once
    CHECK(control.n_pauses() == 1 && control.n_probes() == 4);
    for (int i = 0; i < 10; ++i) {
        CHECK(!idle_step(1));
    }
    // when costs allow it again, it goes on as before
    control.begin_step(true);
    CHECK(control.current() == state::drafting && !control.is_ruled_out());
    control.end_step(true, 2, 1);
    CHECK(control.current() == state::drafting);
    CHECK(!idle_step(1) && control.n_pauses() == 1); // costs that waver are one pause
}

void test_probes_end_where_costs_waver() {
    controller control;
    for (int i = 0; i < 10; ++i) { // pauses by itself
        control.end_step(false, 1, 1);
        control.end_step(true, 1, 3);
    }
    CHECK(control.current() == state::paused);
    for (int i = 0; i < 1'024; ++i) {
        CHECK(!control.begin_step(false));
        control.end_step(false, 1, 1);
    }
    int n_drafts = 0;
    for (int i = 0; i < 100; ++i) {
        const bool draft = control.begin_step(i % 2 != 0);
        n_drafts += draft;
        control.end_step(draft, 1, 1.1);
    }
    CHECK(n_drafts >= 1 && n_drafts <= 3 + 2 * 3); // one probe of what was ruled out, two of what is in doubt
}

void test_draft_length() {
    controller control;
    CHECK(control.draft_length() == 0);
    for (int i = 0; i < 200; ++i) {
        control.note_admitted(i % 2 == 0 ? 2 : 4);
    }
    CHECK(std::abs(control.draft_length() - 3) < 0.2);
}

void test_state_is_kept() {
    controller paused;
    for (int i = 0; i < 60; ++i) {
        steady_step(paused, 1.5);
    }
    CHECK(paused.current() == state::paused);
    controller copy;
    CHECK(copy.load(paused.save()) && copy.save() == paused.save());
    for (int i = 0; i < 3'000; ++i) { // it probes when the other one does
        CHECK(steady_step(copy, 1.5) == steady_step(paused, 1.5));
    }
    while (!paused.begin_step()) {
        paused.end_step(false, 1, 1);
    }
    CHECK(copy.load(paused.save()));
    CHECK(copy.current() == state::paused && copy.begin_step()); // the probe is repeated

    const std::vector<double> good = paused.save();
    const std::vector<double> kept = copy.save();
    CHECK(!copy.load({}) && !copy.load(std::vector<double>(good.size() + 1, 1)));
    for (size_t i = 0; i < good.size(); ++i) {
        for (const double bad : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
            auto changed = good;
            changed[i] = bad;
            CHECK(!copy.load(changed));
        }
    }
    for (const auto & [index, bad] : {std::pair(0, 1.0), {1, 2.0}, {7, 0.0}, {9, 0.0}}) { // version, state, sums
        auto changed = good;
        changed[index] = bad;
        CHECK(!copy.load(changed));
    }
    CHECK(copy.save() == kept);
}

} // namespace

void test_controller() {
    test_while_drafting_pays_some_steps_are_plain();
    test_pauses_double_and_are_reset();
    test_long_success_does_not_hide_a_change();
    test_a_dear_probe_ends_at_once();
    test_steps_without_drafts_are_plain();
    test_a_stall_decides_nothing();
    test_impossible_steps_are_ignored();
    test_what_is_ruled_out_is_probed_rarely();
    test_probes_end_where_costs_waver();
    test_draft_length();
    test_state_is_kept();
    test_losing_worlds_cost_two_percent_at_most();
    test_winning_worlds_keep_drafting();
    test_bursts();
    test_changes_are_followed();
}

#include "speculation/calibration.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace s2moe {

namespace {

constexpr double state_version = 1;
constexpr double prior = 20;        // observations
constexpr double half_life = 2'000; // observations

double cleaned(double confidence) {
    return confidence > 0 ? std::min(confidence, 1.0) : 0; // NaN is not > 0
}

} // namespace

// Corrected values at the middles of the tenths.
std::array<double, calibration::n_tenths> calibration::curve(int depth) const {
    const row & own = tallies[std::clamp(depth, 1, n_depths) - 1];
    struct block {
        double value;
        double weight;
        int length;
    };
    std::vector<block> blocks;
    for (int i = 0; i < n_tenths; ++i) {
        tally others;
        for (const row & tenths : tallies) {
            if (&tenths != &own) {
                others.n += tenths[i].n;
                others.confidence += tenths[i].confidence;
                others.accepted += tenths[i].accepted;
            }
        }
        const double shared = (others.accepted - others.confidence) / (others.n + prior);
        const double correction = (own[i].accepted - own[i].confidence + prior * shared) / (own[i].n + prior);
        const double middle = (i + 0.5) / n_tenths;
        blocks.push_back({std::clamp(middle + correction, 0.0, 1.0), own[i].n + others.n / prior + 1, 1});
        while (blocks.size() > 1 && blocks[blocks.size() - 2].value > blocks.back().value) {
            const block last = blocks.back();
            blocks.pop_back();
            block & before = blocks.back();
            const double weight = before.weight + last.weight;
            before = {(before.value * before.weight + last.value * last.weight) / weight,
                      weight,
                      before.length + last.length};
        }
    }
    std::array<double, n_tenths> result{};
    int i = 0;
    for (const block & each : blocks) {
        for (int k = 0; k < each.length; ++k) {
            result[i++] = each.value;
        }
    }
    return result;
}

double calibration::calibrated(double confidence, int depth) const {
    confidence = cleaned(confidence);
    const auto values = curve(depth);
    const auto correction = [&](int i) { return values[i] - (i + 0.5) / n_tenths; };
    const double place = confidence * n_tenths - 0.5; // in tenths, from the first middle
    double result = 0;
    if (place <= 0) {
        result = confidence + correction(0);
    } else if (place >= n_tenths - 1) {
        result = confidence + correction(n_tenths - 1);
    } else {
        const int i = static_cast<int>(place);
        const double share = place - i;
        result = confidence + (1 - share) * correction(i) + share * correction(i + 1);
    }
    return std::clamp(result, 0.0, 1.0);
}

void calibration::observe(double confidence, int depth, bool accepted) {
    static const double decay = std::exp2(-1 / half_life);
    confidence = cleaned(confidence);
    const double expected = calibrated(confidence, depth);
    judged & same =
        fresh[std::clamp(depth, 1, n_depths) - 1][std::min(static_cast<int>(expected * n_tenths), n_tenths - 1)];
    ++same.n;
    same.accepted += accepted;
    same.expected += expected;
    for (row & tenths : tallies) {
        for (tally & each : tenths) {
            each.n *= decay;
            each.confidence *= decay;
            each.accepted *= decay;
        }
    }
    const int tenth = std::min(static_cast<int>(confidence * n_tenths), n_tenths - 1);
    tally & own = tallies[std::clamp(depth, 1, n_depths) - 1][tenth];
    own.n += 1;
    own.confidence += confidence;
    own.accepted += accepted ? 1 : 0;
}

calibration::judged_drafts calibration::take_judged() {
    return std::exchange(fresh, {});
}

std::vector<double> calibration::save() const {
    std::vector<double> state{state_version};
    for (const row & tenths : tallies) {
        for (const tally & each : tenths) {
            state.insert(state.end(), {each.n, each.confidence, each.accepted});
        }
    }
    return state;
}

bool calibration::load(std::span<const double> state) {
    if (state.size() != 1 + 3 * n_tenths * n_depths || state[0] != state_version) {
        return false;
    }
    decltype(tallies) loaded{};
    const double * next = state.data() + 1;
    for (row & tenths : loaded) {
        for (tally & each : tenths) {
            each = {next[0], next[1], next[2]};
            next += 3;
            // sums of numbers up to 1; the comparisons are false for NaN. No sum exceeds half_life / ln 2.
            const double most = each.n * (1 + 1e-9) + 1e-9;
            if (!(each.n >= 0 && each.n <= 2 * half_life && each.confidence >= 0 && each.confidence <= most &&
                  each.accepted >= 0 && each.accepted <= most)) {
                return false;
            }
        }
    }
    tallies = loaded;
    return true;
}

} // namespace s2moe

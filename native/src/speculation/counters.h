// What one answer's speculation did.

#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "calibration.h"
#include "json.h"
#include "s2moe.h"

namespace s2moe {

// How often something took how long.
struct duration_histogram {
    // upper bounds of the buckets in seconds; a last bucket has none
    static constexpr std::array<double, 17> bounds = {
        0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5};

    std::array<int64_t, bounds.size() + 1> counts = {};
    double seconds = 0; // of all of them

    void add(double duration);
};

// All since begin(); docs/speculation.md explains each.
struct speculation_counters {
    static constexpr int depths = S2MOE_N_VERIFY_ROWS - 1;

    std::string disabled_reason;
    std::string disabled_detail;
    int64_t n_steps = 0;
    int64_t n_iterations = 0;
    int64_t n_tokens = 0;
    int64_t n_drafted = 0;
    int64_t n_admitted = 0;
    int64_t n_accepted = 0;
    std::array<int64_t, depths> admitted_by_depth = {};
    std::array<int64_t, depths> accepted_by_depth = {};
    std::array<int64_t, depths + 1> acceptance_lengths = {};
    double draft_seconds = 0;
    double verify_seconds = 0;
    double sample_seconds = 0;
    duration_histogram draft_durations;  // drafts of one step
    duration_histogram verify_durations; // evaluations that verified drafts
    duration_histogram plain_durations;  // evaluations of one token, whether drafts were thought of or not
    double stall_seconds = 0;
    int64_t n_experts_touched = 0;
    int64_t n_experts_exact = 0;
    int64_t n_row_experts = 0;
    int64_t n_touched_multi = 0;
    int64_t n_exact_multi = 0;
    int64_t n_missing = 0;
    int64_t n_missing_exact = 0;
    double displaced_weight = 0;
    int64_t n_token_layers = 0;
    int64_t n_committed_rows = 0;
    int64_t n_biased_rows = 0;
    int64_t routing_hits = 0;
    int64_t routing_misses = 0;
    int64_t routing_extra = 0;
    calibration::judged_drafts judged = {};

    void add_judged(const calibration::judged_drafts & more);

    // An object with one key per member, and the bounds of the durations.
    common_json to_json() const;
};

} // namespace s2moe

// What one answer's speculation did.

#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "json.h"
#include "s2moe.h"

namespace s2moe {

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
    std::array<std::array<int64_t, 2>, 10> confidence = {};
    std::array<std::array<int64_t, 2>, depths> confidence_by_depth = {};

    // An object with one key per member.
    common_json to_json() const;
};

} // namespace s2moe

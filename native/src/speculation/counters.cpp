#include "counters.h"

#include <algorithm>
#include <vector>

namespace s2moe {

namespace {

template <typename value, size_t n> std::vector<value> list(const std::array<value, n> & values) {
    return {values.begin(), values.end()};
}

common_json triples(const calibration::judged_drafts & judged) {
    common_json result = common_json::array();
    for (int depth = 1; depth <= speculation_counters::depths; ++depth) {
        common_json tenths = common_json::array();
        for (const calibration::judged & each : judged[depth - 1]) {
            tenths.push_back(common_json::array({each.n, each.accepted, each.expected}));
        }
        result.push_back(tenths);
    }
    return result;
}

common_json durations(const duration_histogram & histogram) {
    return {{"counts", list(histogram.counts)}, {"seconds", histogram.seconds}};
}

} // namespace

void duration_histogram::add(double duration) {
    ++counts[std::lower_bound(bounds.begin(), bounds.end(), duration) - bounds.begin()];
    seconds += duration;
}

void speculation_counters::add_judged(const calibration::judged_drafts & more) {
    for (size_t depth = 0; depth < judged.size(); ++depth) {
        for (size_t tenth = 0; tenth < judged[depth].size(); ++tenth) {
            judged[depth][tenth].n += more[depth][tenth].n;
            judged[depth][tenth].accepted += more[depth][tenth].accepted;
            judged[depth][tenth].expected += more[depth][tenth].expected;
        }
    }
}

common_json speculation_counters::to_json() const {
    return {{"disabled_reason", disabled_reason},
            {"disabled_detail", disabled_detail},
            {"n_steps", n_steps},
            {"n_iterations", n_iterations},
            {"n_tokens", n_tokens},
            {"n_drafted", n_drafted},
            {"n_admitted", n_admitted},
            {"n_accepted", n_accepted},
            {"admitted_by_depth", list(admitted_by_depth)},
            {"accepted_by_depth", list(accepted_by_depth)},
            {"acceptance_lengths", list(acceptance_lengths)},
            {"draft_seconds", draft_seconds},
            {"verify_seconds", verify_seconds},
            {"sample_seconds", sample_seconds},
            {"step_durations",
             {{"draft", durations(draft_durations)},
              {"verify", durations(verify_durations)},
              {"plain", durations(plain_durations)}}},
            {"step_duration_bounds", list(duration_histogram::bounds)},
            {"stall_seconds", stall_seconds},
            {"n_experts_touched", n_experts_touched},
            {"n_experts_exact", n_experts_exact},
            {"n_row_experts", n_row_experts},
            {"n_touched_multi", n_touched_multi},
            {"n_exact_multi", n_exact_multi},
            {"n_missing", n_missing},
            {"n_missing_exact", n_missing_exact},
            {"displaced_weight", displaced_weight},
            {"n_token_layers", n_token_layers},
            {"n_committed_rows", n_committed_rows},
            {"n_biased_rows", n_biased_rows},
            {"routing_hits", routing_hits},
            {"routing_misses", routing_misses},
            {"routing_extra", routing_extra},
            {"judged_drafts", triples(judged)}};
}

} // namespace s2moe

// What the speculator learns from a step and tells of an answer.

#include <algorithm>

#include "llama-moe.h"
#include "means.h"
#include "speculator.h"

namespace s2moe {

namespace {

common_json fit_json(const cost_model::fit & fit) {
    return {{"r2", fit.r2},
            {"mape", fit.mape},
            {"n", fit.n},
            {"intercept_seconds", fit.intercept},
            {"row_seconds", fit.row},
            {"hit_seconds", fit.hit},
            {"miss_seconds", fit.miss}};
}

} // namespace

// touched: by all rows of the evaluation
void speculator::learn_costs(const expert_set & touched, bool drafted, double seconds) {
    const int n_rows = static_cast<int>(target->gate().rows().size());
    const auto counts = touched.new_beyond({}, target->gate().resident());
    if (n_rows == 1) {
        if (!drafted) { // else its experts were read ahead
            verify_costs.observe({1, counts.resident, counts.missing}, seconds);
            average(learnt->single_seconds, seconds);
        }
        return;
    }
    if (n_rows <= S2MOE_N_VERIFY_ROWS) { // wider ones are computed by other kernels
        verify_costs.observe({n_rows, counts.resident, counts.missing}, seconds);
    }
    const auto added = touched.new_beyond(target->gate().rows().front().chosen, target->gate().resident());
    average(learnt->typical_hits, std::max(nearly_none, static_cast<double>(added.resident) / (n_rows - 1)));
    average(learnt->typical_misses, std::max(nearly_none, static_cast<double>(added.missing) / (n_rows - 1)));
}

// A root without the gate: the cache knows what it used, and nothing was bent.
void speculator::count_ungated(const s2moe_expert_stats & before,
                               const s2moe_expert_stats & after,
                               bool drafted,
                               double seconds) {
    const auto grown = [&](const uint64_t (s2moe_expert_stats::*member)[S2MOE_N_PHASES]) {
        return static_cast<int>((after.*member)[S2MOE_PHASE_DECODE] - (before.*member)[S2MOE_PHASE_DECODE]);
    };
    const int n_missed = grown(&s2moe_expert_stats::misses);
    const int n_late = static_cast<int>(after.prefetches_late - before.prefetches_late);
    int n_touched = n_missed + grown(&s2moe_expert_stats::hits) + grown(&s2moe_expert_stats::prefetched);
    if (experts == nullptr) {
        n_touched = k * n_moe_layers;
    }
    const int n_missing = n_missed + n_late;
    if (!drafted) {
        verify_costs.observe({1, n_touched - n_missing, n_missing}, seconds);
        average(learnt->single_seconds, seconds);
    }
    counters.n_experts_touched += n_touched;
    counters.n_experts_exact += n_touched;
    counters.n_missing += n_missing;
    counters.n_missing_exact += n_missing;
}

void speculator::count_experts(const drafted_tree & tree, double seconds) {
    const auto & rows = target->gate().rows();
    const expert_set & resident = target->gate().resident();
    expert_set touched;
    expert_set exact;
    int64_t n_choices = 0;
    for (const auto & row : rows) {
        touched.unite(row.chosen);
        exact.unite(row.exact);
        n_choices += row.exact.size();
    }
    learn_costs(touched, tree.used, seconds);
    counters.n_experts_touched += touched.size();
    counters.n_experts_exact += exact.size();
    if (rows.size() > 1) {
        counters.n_row_experts += n_choices;
        counters.n_touched_multi += touched.size();
        counters.n_exact_multi += exact.size();
    }
    counters.n_missing += touched.new_beyond({}, resident).missing;
    counters.n_missing_exact += exact.new_beyond({}, resident).missing;
    for (size_t i = 0; i < tree.predicted.size() && i < rows.size(); ++i) {
        if (tree.predicted[i].size() == 0) {
            continue;
        }
        const auto overlap = rows[i].exact.new_beyond({}, tree.predicted[i]);
        counters.routing_hits += overlap.resident;
        counters.routing_misses += overlap.missing;
        counters.routing_extra += tree.predicted[i].size() - overlap.resident;
    }
}

void speculator::commit(const drafted_tree & tree, const std::vector<int> & path, bool gated) {
    const int n_admitted = static_cast<int>(tree.nodes.size());
    target->commit(path.empty() ? -1 : path.back());
    committed_rows.clear();
    for (int i = -1; i < static_cast<int>(path.size()); ++i) {
        const int row = i < 0 ? 0 : path[i] + 1;
        const auto & result = target->gate().rows()[row];
        committed_rows.push_back({row, i + 1, result.n_biased});
        counters.displaced_weight += result.displaced;
        counters.n_token_layers += gated ? result.n_layers : n_moe_layers;
        ++counters.n_committed_rows;
        counters.n_biased_rows += result.n_biased > 0;
    }
    if (n_admitted == 0) {
        return;
    }
    counters.add_judged(learnt->confidences.take_judged());
    ++counters.n_iterations;
    counters.n_admitted += n_admitted;
    counters.n_accepted += static_cast<int64_t>(path.size());
    ++counters.acceptance_lengths[path.size()];
    for (const verify_node & node : tree.nodes) {
        ++counters.admitted_by_depth[node.depth - 1];
    }
    for (const int node : path) {
        ++counters.accepted_by_depth[tree.nodes[node].depth - 1];
    }
}

// Whether a step of cascade was one of the length that it tests or keeps to, as far as there was room for it: in short
// answers there is never more. A step without any room drafts nothing, whatever the length.
bool speculator::tells_of_length(const drafted_tree & tree, int n_nodes) const {
    const int length = learnt->lengths.length();
    return (n_nodes > 0 || length == 0) && static_cast<int>(tree.nodes.size()) == std::min(length, n_nodes);
}

std::string speculator::report() const {
    common_json result = counters.to_json();
    result["method"] = method_name(options.method);
    result["preset"] = options.preset;
    result["error_budget"] = options.gate.budget;
    const int64_t n_reused = llama_moe_get_n_graph_reuses(ctx) - n_reuses_before;
    result["n_graph_builds"] = std::max<int64_t>(0, n_decodes - n_reused);
    result["controller"] = {{"is_paced", is_paced()},
                            {"state",
                             options.method == draft_method::off || !counters.disabled_reason.empty() ? "off"
                             : is_paced() ? learnt->pacing.name()
                                          : "drafting"},
                            {"n_pauses", learnt->pacing.n_pauses()},
                            {"n_probes", learnt->pacing.n_probes()},
                            {"draft_length", learnt->pacing.draft_length()}};
    common_json verify = fit_json(verify_costs.quality());
    if (options.samples) {
        common_json samples = common_json::array();
        for (const auto & [predicted, measured] : verify_costs.samples()) {
            samples.push_back(std::vector<double>{predicted, measured});
        }
        verify["samples"] = samples;
    }
    result["costs"] = {
        {"verify", verify}, {"draft", fit_json(draft_costs.quality())}, {"single_seconds", learnt->single_seconds}};
    result["width"] = branches;
    size_t graph_bytes = target == nullptr ? 0 : target->graph_bytes() + shared_drafter->graph_bytes();
    graph_bytes += own_drafter == nullptr ? 0 : own_drafter->graph_bytes();
    result["graph_bytes"] = static_cast<int64_t>(graph_bytes);
    return result.dump();
}

} // namespace s2moe

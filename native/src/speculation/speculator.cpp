#include "speculator.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <tuple>

#include "error.h"
#include "llama-moe.h"

namespace s2moe {

namespace {

constexpr int state_version = 1;
constexpr double average_share = 0.1; // of a new sample in a decayed mean
constexpr int fixed_depth = 4;        // of the tree without adaptive expansion
constexpr int fixed_width = 2;
constexpr int skip_depth = 7; // of expert-skip's tree
constexpr int wide_rows_max = 16;

constexpr double nearly_none = 1e-3; // of an average that is 0 while unknown

double seconds_since(std::chrono::steady_clock::time_point begun) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// `mean` < 0 or 0: nothing known yet.
void average(double & mean, double sample) {
    mean = mean <= 0 ? sample : mean + average_share * (sample - mean);
}

std::vector<double> numbers(const common_json & object, const char * key) {
    std::vector<double> result;
    if (object.contains(key)) {
        for (const common_json & each : object.at(key)) {
            result.push_back(each.get<double>());
        }
    }
    return result;
}

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

speculator::speculator(llama_context * ctx, llama_context * draft_ctx, const char * state_json)
    : ctx(ctx), experts(experts_of(ctx)), vocab(llama_model_get_vocab(llama_get_model(ctx))),
      draftable(llama_moe_model_is_draftable(llama_get_model(ctx))), branches(llama_moe_can_branch(ctx)),
      k(llama_moe_model_n_expert_used(llama_get_model(ctx))), n_expert(llama_moe_model_n_expert(llama_get_model(ctx))),
      n_moe_layers(llama_moe_model_n_moe_layer(llama_get_model(ctx))),
      n_sequences(branches ? static_cast<int>(llama_n_seq_max(ctx)) : 1) {
    if (draftable) {
        target = std::make_unique<verifier>(ctx, experts, n_sequences);
        shared_drafter = std::make_unique<drafter>(ctx, experts, true, n_sequences);
        if (draft_ctx != nullptr) {
            const int n = llama_moe_can_branch(draft_ctx) ? static_cast<int>(llama_n_seq_max(draft_ctx)) : 1;
            own_drafter = std::make_unique<drafter>(draft_ctx, experts, false, n);
        }
    }
    if (state_json == nullptr || *state_json == '\0') {
        return;
    }
    try {
        const common_json state = common_json::parse(state_json);
        if (state.at("version").get<int>() != state_version) {
            return;
        }
        const auto scalars = numbers(state, "seconds");
        // each checks what it takes; what does not fit is learnt again
        verify_costs.load(numbers(state, "verify"));
        draft_costs.load(numbers(state, "draft"));
        confidences.load(numbers(state, "confidence"));
        pacing.load(numbers(state, "controller"));
        if (scalars.size() == 4 && std::all_of(scalars.begin(), scalars.end(), [](double x) {
                return std::isfinite(x) && x >= -1 && x < 1e6;
            })) {
            draft_seconds = scalars[0];
            single_seconds = scalars[1];
            typical_hits = scalars[2];
            typical_misses = scalars[3];
        }
    } catch (const common_json_error &) {
        // of another version, or damaged: learnt again
    }
}

std::string speculator::state() const {
    const common_json result = {
        {"version", state_version},
        {"verify", verify_costs.save()},
        {"draft", draft_costs.save()},
        {"confidence", confidences.save()},
        {"controller", pacing.save()},
        {"seconds", std::vector<double>{draft_seconds, single_seconds, typical_hits, typical_misses}}};
    return result.dump();
}

void speculator::begin(const char * options_json) {
    speculation_options next = read_options(options_json, std::max(1, k), std::max(1, n_expert));
    if (next.method != draft_method::off && !draftable) {
        throw failure(S2MOE_ERROR_UNSUPPORTED, "this model cannot be drafted for");
    }
    if (next.method != draft_method::off && !next.shared_context && own_drafter == nullptr) {
        throw failure(S2MOE_ERROR_UNSUPPORTED,
                      "shared_context is false, but there is no second context: start the server with "
                      "--speculation expert-skip or --no-shared-context");
    }
    options = std::move(next);
    counters = {};
    n_decodes = 0;
    n_reuses_before = llama_moe_get_n_graph_reuses(ctx);
    history.clear();
    committed_rows.clear();
    begun = true;
}

void speculator::feed(std::span<const llama_token> tokens) {
    history.assign(tokens.begin(), tokens.end());
}

double speculator::credit() const {
    return std::max(0.0,
                    options.gate.budget * static_cast<double>(counters.n_token_layers) - counters.displaced_weight);
}

// Rows that may follow the root.
int speculator::room(llama_pos position, int n_max) const {
    const int64_t free_cells = static_cast<int64_t>(llama_n_ctx(ctx)) - position - 1;
    const int wanted = options.method == draft_method::expert_skip ? 2 * skip_depth : options.max_nodes;
    return static_cast<int>(
        std::clamp<int64_t>(std::min<int64_t>({wanted, free_cells, static_cast<int64_t>(llama_n_ubatch(ctx)) - 1}),
                            0,
                            n_max > 1 ? wide_rows_max - 1 : 0));
}

bool speculator::may_draft(int n_nodes) const {
    return options.method != draft_method::off && counters.disabled_reason.empty() && n_nodes > 0;
}

void speculator::disable(const char * reason, const std::string & detail) {
    counters.disabled_reason = reason;
    counters.disabled_detail = detail;
}

drafter & speculator::active_drafter() {
    return options.shared_context ? *shared_drafter : *own_drafter;
}

expansion_costs speculator::costs() const {
    if (!verify_costs.ready() || single_seconds <= 0) {
        return {};
    }
    return {.single_seconds = single_seconds,
            .row_seconds = verify_costs.marginal({1, 0, 0}),
            .hit_seconds = verify_costs.marginal({0, 1, 0}),
            .miss_seconds = verify_costs.marginal({0, 0, 1}),
            .draft_seconds = draft_seconds};
}

void speculator::prefetch(const expert_set & wanted, const expert_set & covered, const expert_set & resident) {
    if (experts == nullptr || !options.prefetch) {
        return;
    }
    std::vector<s2moe_expert_id> ids;
    wanted.for_each_beyond(covered, [&](int layer, int expert) {
        if (!resident.has(layer, expert)) {
            ids.push_back({layer, expert});
        }
    });
    if (!ids.empty()) {
        experts->prefetch(ids, S2MOE_PRIORITY_PREFETCH);
    }
}

// What the coming verification is expected to need is not evicted by what is read ahead for it.
void speculator::pin(const expert_set & wanted) {
    if (experts == nullptr || !options.prefetch) {
        return;
    }
    std::vector<s2moe_expert_id> ids;
    wanted.for_each_beyond({}, [&](int layer, int expert) { ids.push_back({layer, expert}); });
    experts->pin(ids);
}

speculator::drafted_tree speculator::draft(llama_token root, llama_pos position, int n_nodes) {
    drafter & by = active_drafter();
    drafted_tree tree;
    int depth = 0;
    int width = 1;
    if (options.method == draft_method::cascade) {
        depth = std::min(lengths.length(), n_nodes);
        if (depth == 0) {
            return tree;
        }
    } else if (options.method == draft_method::expert_skip) {
        depth = skip_depth;
        width = 2;
    } else if (!options.adaptive) {
        depth = fixed_depth;
        width = fixed_width;
    } else if (!verify_costs.ready() || single_seconds <= 0) {
        depth = 1 + static_cast<int>(counters.n_steps % std::max(1, std::min(fixed_depth, n_nodes))); // calibration
    }
    if (!by.is_shared()) {
        by.feed(history);
    }
    const auto begun_at = clock::now();
    try {
        by.begin(root, position, options.draft_experts);
        tree = depth > 0 ? draft_fixed(by, n_nodes, depth, n_sequences > 1 ? width : 1) : draft_adaptively(by, n_nodes);
    } catch (const failure & error) {
        by.end();
        if (error.status == S2MOE_ERROR_ABORTED) {
            throw;
        }
        disable(error.status == S2MOE_ERROR_CONTEXT_FULL ? "context_full" : "error", error.what());
        return {};
    } catch (const std::exception & error) {
        by.end();
        disable("error", error.what());
        return {};
    }
    by.end();
    counters.draft_seconds += seconds_since(begun_at);
    return tree;
}

draft_view speculator::evaluate_draft(drafter & by, int parent, llama_token token) {
    const auto begun_at = clock::now();
    draft_view view = by.evaluate(parent, token);
    const double seconds = seconds_since(begun_at);
    average(draft_seconds, seconds);
    draft_costs.observe({1, by.n_used_experts(), 0}, seconds);
    n_decodes += by.is_shared();
    return view;
}

// `width` chains of the likeliest tokens, the i-th beginning with the i-th likeliest.
speculator::drafted_tree speculator::draft_fixed(drafter & by, int n_nodes, int depth, int width) {
    drafted_tree tree;
    tree.used = true;
    const auto evaluate = [&](int parent, llama_token token) { return evaluate_draft(by, parent, token); };
    int n_evaluated = 1;
    const draft_view root = evaluate(-1, 0);
    prefetch(root.likely, {}, {});
    tree.predicted.push_back(root.predicted);
    for (int chain = 0; chain < width && chain < static_cast<int>(root.next.size()); ++chain) {
        int parent = -1;
        int evaluated_parent = 0;
        double path = 1;
        auto [token, confidence] = root.next[chain];
        for (int d = 1; d <= depth && static_cast<int>(tree.nodes.size()) < n_nodes; ++d) {
            path *= confidences.calibrated(confidence, d);
            tree.nodes.push_back({parent, token, d, path, confidence});
            ++counters.n_drafted;
            tree.predicted.emplace_back();
            parent = static_cast<int>(tree.nodes.size()) - 1;
            if (d == depth || static_cast<int>(tree.nodes.size()) == n_nodes) {
                break; // its own continuation is not wanted
            }
            const draft_view view = evaluate(evaluated_parent, token);
            evaluated_parent = n_evaluated++;
            prefetch(view.likely, {}, {});
            tree.predicted.back() = view.predicted;
            if (view.next.empty()) {
                break;
            }
            std::tie(token, confidence) = view.next.front();
        }
    }
    return tree;
}

speculator::drafted_tree speculator::draft_adaptively(drafter & by, int n_nodes) {
    drafted_tree tree;
    tree.used = true;
    std::vector<draft_view> views;    // of what was evaluated, in order
    std::vector<int> evaluation = {}; // of the expansion's nodes: index in `views`
    const auto evaluate = [&](int parent, llama_token token) { views.push_back(evaluate_draft(by, parent, token)); };
    evaluate(-1, 0);
    const expert_set resident = by.resident();
    expansion growing(costs(),
                      {.nodes_max = n_nodes,
                       .depth_max = std::min(n_nodes, S2MOE_N_VERIFY_ROWS - 1),
                       .children_max = n_sequences > 1 ? 4 : 1,
                       .leaves_max = n_sequences,
                       .width = n_sequences > 1},
                      views[0].predicted,
                      resident);
    if (typical_hits >= 0) {
        growing.set_typical(typical_hits, typical_misses);
    }
    pin(views[0].predicted);
    prefetch(views[0].likely, {}, resident);
    growing.offer(-1, views[0].next, confidences);
    int n_leaves_drafted = 1;
    std::vector<int> n_children(1, 0); // evaluated children by view
    for (int i = growing.next(); i >= 0; i = growing.next()) {
        const draft_node node = growing.nodes()[i];
        const int parent = node.parent < 0 ? 0 : evaluation[node.parent];
        if (n_children[parent] > 0 && ++n_leaves_drafted > n_sequences) {
            break;
        }
        ++n_children[parent];
        const expert_set covered = growing.covered();
        evaluate(parent, node.token);
        n_children.push_back(0);
        evaluation.resize(growing.nodes().size(), -1);
        evaluation[i] = static_cast<int>(views.size()) - 1;
        growing.evaluated(i, views.back().predicted);
        for (const int admitted : growing.take_admitted()) {
            pin(growing.covered());
            prefetch(views[evaluation[admitted]].likely, covered, resident);
            growing.offer(admitted, views[evaluation[admitted]].next, confidences);
        }
        evaluation.resize(growing.nodes().size(), -1);
    }
    counters.n_drafted += static_cast<int64_t>(growing.finish().size() + views.size()) - 1; // the root is no draft
    tree.predicted.push_back(views[0].predicted);
    std::vector<int> index(growing.nodes().size(), -1);
    for (const int i : growing.admitted()) {
        const draft_node & node = growing.nodes()[i];
        index[i] = static_cast<int>(tree.nodes.size());
        tree.nodes.push_back(
            {node.parent < 0 ? -1 : index[node.parent], node.token, node.depth, node.path, node.confidence});
        tree.predicted.push_back(node.predicted);
    }
    return tree;
}

std::vector<llama_token> speculator::step(llama_token root, llama_pos position, int n_max, const chooser & choose) {
    if (!begun) {
        throw failure(S2MOE_ERROR_INVALID, "s2moe_speculator_begin() must come before a step");
    }
    if (n_max < 1 || root < 0 || root >= llama_vocab_n_tokens(vocab)) {
        throw failure(S2MOE_ERROR_INVALID, "n_max must be at least 1, and root a token of the vocabulary");
    }
    const llama_pos last = llama_memory_seq_pos_max(llama_get_memory(ctx), 0);
    if (last != position - 1) {
        throw failure(S2MOE_ERROR_INVALID,
                      "the KV cache ends at position " + std::to_string(last) + ", not at " +
                          std::to_string(position - 1));
    }
    if (!draftable) {
        return step_plainly(root, position, choose);
    }
    const auto begun_at = clock::now();
    const int n_nodes =
        std::min(room(position, n_max), options.method == draft_method::expert_skip ? wide_rows_max : n_max - 1);
    const bool paced = options.method == draft_method::s2moe && options.adaptive;
    drafted_tree tree;
    if (may_draft(n_nodes) && (!paced || pacing.begin_step())) {
        tree = draft(root, position, n_nodes);
    }
    s2moe_expert_stats before = {};
    if (experts != nullptr) {
        experts->stats(before);
    }
    const bool bends_root =
        options.gate.budget > 0 && options.gate.single_token_bias && target->gate().some_are_missing();
    const bool gated = !tree.nodes.empty() || bends_root;
    const auto verify_at = clock::now();
    target->evaluate(root, position, tree.nodes, options.gate, credit(), gated);
    const double verify_seconds = seconds_since(verify_at);
    pin({});
    std::vector<llama_token> tokens;
    std::vector<int> path; // accepted nodes
    try {
        const auto sample_at = clock::now();
        accept(tree, std::min(n_max, S2MOE_N_VERIFY_ROWS), choose, tokens, path);
        counters.sample_seconds += seconds_since(sample_at);
    } catch (...) {
        target->discard();
        throw;
    }
    counters.verify_seconds += verify_seconds;
    s2moe_expert_stats after = {};
    if (experts != nullptr) {
        experts->stats(after);
        counters.stall_seconds += after.stall_seconds[S2MOE_PHASE_DECODE] - before.stall_seconds[S2MOE_PHASE_DECODE];
    }
    ++n_decodes;
    if (gated) {
        learn_costs(static_cast<int>(tree.nodes.size()) + 1, verify_seconds);
        count_experts(tree);
    } else {
        count_ungated(before, after, verify_seconds);
    }
    commit(tree, path);
    history.push_back(root);
    for (const int node : path) {
        history.push_back(tree.nodes[node].token);
    }
    ++counters.n_steps;
    counters.n_tokens += static_cast<int64_t>(tokens.size());
    const double seconds = seconds_since(begun_at);
    if (paced) {
        pacing.end_step(tree.used, static_cast<int>(tokens.size()), seconds);
        if (tree.used) {
            pacing.note_admitted(static_cast<int>(tree.nodes.size()));
        }
    } else if (options.method == draft_method::cascade) {
        lengths.end_step(static_cast<int>(tokens.size()), seconds);
    }
    return tokens;
}

// For a model without a speculator's means.
std::vector<llama_token> speculator::step_plainly(llama_token root, llama_pos position, const chooser & choose) {
    const auto begun_at = clock::now();
    token_batch batch;
    batch.add(root, position, {0}, true);
    run_batch(ctx, batch, position, 1, decode_kind::by_width, experts);
    std::vector<llama_token> tokens;
    try {
        check_logits(ctx, 0);
        tokens.push_back(choose(0));
    } catch (...) {
        llama_memory_seq_rm(llama_get_memory(ctx), 0, position, -1);
        throw;
    }
    committed_rows = {{0, 0, 0}};
    ++counters.n_steps;
    ++counters.n_tokens;
    ++counters.n_committed_rows;
    counters.verify_seconds += seconds_since(begun_at);
    return tokens;
}

void speculator::accept(const drafted_tree & tree,
                        int n_max,
                        const chooser & choose,
                        std::vector<llama_token> & tokens,
                        std::vector<int> & path) {
    int node = -1;
    while (true) {
        try {
            check_logits(ctx, node + 1);
            tokens.push_back(choose(node + 1));
        } catch (const failure &) {
            if (tokens.empty()) {
                throw;
            }
            path.pop_back(); // the last token is a root again, and the next step will meet the failure
            return;
        }
        const llama_token token = tokens.back();
        if (static_cast<int>(tokens.size()) >= n_max || llama_vocab_is_eog(vocab, token)) {
            return;
        }
        int next = -1;
        for (int i = 0; i < static_cast<int>(tree.nodes.size()); ++i) {
            if (tree.nodes[i].parent != node) {
                continue;
            }
            const bool accepted = tree.nodes[i].token == token;
            const int depth = tree.nodes[i].depth;
            const double confidence = confidences.calibrated(tree.nodes[i].confidence, depth);
            auto & tenth = counters.confidence[std::clamp(static_cast<int>(confidence * 10), 0, 9)];
            ++tenth[0];
            tenth[1] += accepted;
            ++counters.confidence_by_depth[depth - 1][0];
            counters.confidence_by_depth[depth - 1][1] += accepted;
            confidences.observe(tree.nodes[i].confidence, depth, accepted);
            if (accepted) {
                next = i;
            }
        }
        if (next < 0) {
            return;
        }
        node = next;
        path.push_back(node);
    }
}

void speculator::learn_costs(int n_rows, double seconds) {
    expert_set touched;
    for (const auto & row : target->gate().rows()) {
        touched.unite(row.chosen);
    }
    const auto counts = touched.new_beyond({}, target->gate().resident());
    verify_costs.observe({n_rows, counts.resident, counts.missing}, seconds);
    if (n_rows == 1) {
        average(single_seconds, seconds);
        return;
    }
    const auto added = touched.new_beyond(target->gate().rows().front().chosen, target->gate().resident());
    average(typical_hits, std::max(nearly_none, static_cast<double>(added.resident) / (n_rows - 1)));
    average(typical_misses, std::max(nearly_none, static_cast<double>(added.missing) / (n_rows - 1)));
}

// A root without the gate: the cache knows what it used, and nothing was bent.
void speculator::count_ungated(const s2moe_expert_stats & before, const s2moe_expert_stats & after, double seconds) {
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
    verify_costs.observe({1, n_touched - n_missing, n_missing}, seconds);
    average(single_seconds, seconds);
    counters.n_experts_touched += n_touched;
    counters.n_experts_exact += n_touched;
    counters.n_missing += n_missing;
    counters.n_missing_exact += n_missing;
}

void speculator::count_experts(const drafted_tree & tree) {
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

void speculator::commit(const drafted_tree & tree, const std::vector<int> & path) {
    const int n_admitted = static_cast<int>(tree.nodes.size());
    target->commit(path.empty() ? -1 : path.back());
    committed_rows.clear();
    for (int i = -1; i < static_cast<int>(path.size()); ++i) {
        const int row = i < 0 ? 0 : path[i] + 1;
        const auto & result = target->gate().rows()[row];
        committed_rows.push_back({row, i + 1, result.n_biased});
        counters.displaced_weight += result.displaced;
        counters.n_token_layers += n_moe_layers;
        ++counters.n_committed_rows;
        counters.n_biased_rows += result.n_biased > 0;
    }
    if (n_admitted == 0) {
        return;
    }
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

std::string speculator::report() const {
    common_json result = counters.to_json();
    result["method"] = method_name(options.method);
    result["preset"] = options.preset;
    result["error_budget"] = options.gate.budget;
    const int64_t n_reused = llama_moe_get_n_graph_reuses(ctx) - n_reuses_before;
    result["n_graph_builds"] = std::max<int64_t>(0, n_decodes - n_reused);
    const bool paced = options.method == draft_method::s2moe && options.adaptive;
    result["controller"] = {{"state",
                             options.method == draft_method::off || !counters.disabled_reason.empty() ? "off"
                             : paced                                                                  ? pacing.name()
                                                                                                      : "drafting"},
                            {"n_pauses", pacing.n_pauses()},
                            {"n_probes", pacing.n_probes()},
                            {"draft_length", pacing.draft_length()}};
    common_json verify = fit_json(verify_costs.quality());
    if (options.samples) {
        common_json samples = common_json::array();
        for (const auto & [predicted, measured] : verify_costs.samples()) {
            samples.push_back(std::vector<double>{predicted, measured});
        }
        verify["samples"] = samples;
    }
    result["costs"] = {{"verify", verify}, {"draft_seconds", draft_seconds}, {"single_seconds", single_seconds}};
    size_t graph_bytes = target == nullptr ? 0 : target->graph_bytes() + shared_drafter->graph_bytes();
    graph_bytes += own_drafter == nullptr ? 0 : own_drafter->graph_bytes();
    result["graph_bytes"] = static_cast<int64_t>(graph_bytes);
    return result.dump();
}

} // namespace s2moe

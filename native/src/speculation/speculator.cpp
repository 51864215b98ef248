#include "speculator.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "error.h"
#include "llama-moe.h"
#include "means.h"

namespace s2moe {

namespace {

constexpr int state_version = 1;
constexpr int fixed_depth = 4; // of the tree without adaptive expansion
constexpr int fixed_width = 2;
constexpr int skip_width = 2; // of expert-skip's tree
constexpr int wide_rows_max = 16;

// Whatever happens to a draft, its KV rows are taken out.
struct temporary_rows {
    explicit temporary_rows(drafter & by) : by(by) {
    }
    ~temporary_rows() {
        by.end();
    }
    temporary_rows(const temporary_rows &) = delete;
    temporary_rows & operator=(const temporary_rows &) = delete;

    drafter & by;
};

double seconds_since(std::chrono::steady_clock::time_point begun) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
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
        verify_costs.load(read_numbers(state, "verify"));
        draft_costs.load(read_numbers(state, "draft"));
        by_key.load(state.at("regimes"));
    } catch (const common_json_error &) {
        // of another version, or damaged: learnt again
    }
}

std::string speculator::state() const {
    const common_json result = {{"version", state_version},
                                {"verify", verify_costs.save()},
                                {"draft", draft_costs.save()},
                                {"regimes", by_key.save()}};
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
    learnt = &by_key.of(options.regime_key());
    learnt->lengths.limit(options.max_nodes);
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
    // the second chain of expert-skip is no deeper than the first
    const int64_t useful = int64_t{n_max - 1} * (options.method == draft_method::expert_skip ? skip_width : 1);
    const int64_t n_batch = llama_n_ubatch(ctx);
    return static_cast<int>(std::clamp<int64_t>(
        std::min({int64_t{options.max_nodes}, useful, free_cells, n_batch - 1}), 0, wide_rows_max - 1));
}

bool speculator::may_draft(int n_nodes) const {
    return options.method != draft_method::off && counters.disabled_reason.empty() && n_nodes > 0;
}

// Whether drafts can pay at all: with every expert in memory nothing is hidden behind them, so each must at least cost
// less than it saves if it were certain. The costs may be wrong, so the controller tries all the same now and then.
bool speculator::may_pay() const {
    if (!verify_costs.ready() || learnt->single_seconds <= 0 || learnt->draft_seconds <= 0 ||
        learnt->typical_hits < 0 || target->gate().some_are_missing()) {
        return true; // or not known yet
    }
    const expansion_costs known = costs();
    return known.single_seconds >= known.row_seconds + known.hit_seconds * learnt->typical_hits + known.draft_seconds;
}

void speculator::disable(const char * reason, const std::string & detail) {
    counters.disabled_reason = reason;
    counters.disabled_detail = detail;
}

drafter & speculator::active_drafter() {
    return options.shared_context ? *shared_drafter : *own_drafter;
}

expansion_costs speculator::costs() const {
    if (!verify_costs.ready() || learnt->single_seconds <= 0) {
        return {};
    }
    return {.single_seconds = learnt->single_seconds,
            .row_seconds = verify_costs.marginal({1, 0, 0}),
            .hit_seconds = verify_costs.marginal({0, 1, 0}),
            .miss_seconds = verify_costs.marginal({0, 0, 1}),
            .draft_seconds = learnt->draft_seconds};
}

// Whatever happens to a step, nothing stays pinned for it.
struct speculator::pins {
    explicit pins(speculator & owner) : owner(owner) {
    }
    ~pins() {
        owner.unpin();
    }
    pins(const pins &) = delete;
    pins & operator=(const pins &) = delete;

    speculator & owner;
};

void speculator::unpin() {
    if (experts != nullptr && has_pinned) {
        experts->pin({});
        has_pinned = false;
    }
}

void speculator::prefetch(std::span<const s2moe_expert_id> missing) {
    if (experts != nullptr && options.prefetch) {
        experts->prefetch(missing, S2MOE_PRIORITY_PREFETCH);
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
    has_pinned = true;
}

// Depth and width of a tree that does not follow costs; depth < 0: one that does.
std::pair<int, int> speculator::fixed_shape(int n_nodes) const {
    if (options.method == draft_method::cascade) {
        return {std::min(learnt->lengths.length(), n_nodes), 1};
    }
    const bool branching = n_sequences > 1;
    if (options.method == draft_method::expert_skip) {
        const int width = branching ? skip_width : 1;
        return {std::min((n_nodes + width - 1) / width, S2MOE_N_VERIFY_ROWS - 1), width};
    }
    if (!options.adaptive) {
        return {fixed_depth, branching ? fixed_width : 1};
    }
    if (!verify_costs.ready() || learnt->single_seconds <= 0 || learnt->pacing.is_ruled_out()) {
        // to learn, perhaps anew, what drafts and verifications of several widths cost
        return {1 + static_cast<int>(counters.n_steps % std::max(1, std::min(fixed_depth, n_nodes))), 1};
    }
    return {-1, 0};
}

drafted_tree speculator::draft(llama_token root, llama_pos position, int n_nodes) {
    const auto [depth, width] = fixed_shape(n_nodes);
    if (depth == 0) {
        return {};
    }
    drafter & by = active_drafter();
    if (!by.is_shared()) {
        by.feed(history);
    }
    int n_evaluated = 0;
    const draft_surroundings around = {
        .evaluate =
            [&](int parent, llama_token token) {
                draft_view view = evaluate_draft(by, parent, token);
                n_evaluated += parent >= 0; // the root is no draft
                return view;
            },
        .resident = [&]() -> const expert_set & { return by.resident(); },
        .pin = [&](const expert_set & needed) { pin(needed); },
        .read_ahead = [&](std::span<const s2moe_expert_id> missing) { prefetch(missing); },
        .confidences = learnt->confidences};
    drafted_tree tree;
    const auto begun_at = clock::now();
    const auto count = [&] {
        counters.n_drafted += std::max(tree.n_drafted, n_evaluated);
        const double seconds = seconds_since(begun_at);
        counters.draft_seconds += seconds;
        counters.draft_durations.add(seconds);
    };
    try {
        const temporary_rows until_the_end(by);
        by.begin(root, position, options.draft_experts);
        tree = depth > 0 ? draft_fixed(around, n_nodes, depth, width)
                         : draft_adaptively(around,
                                            costs(),
                                            {.n_nodes = n_nodes,
                                             .n_evaluations = static_cast<int>(llama_n_ctx(ctx)) - position,
                                             .n_sequences = n_sequences,
                                             .typical_hits = learnt->typical_hits,
                                             .typical_misses = learnt->typical_misses});
    } catch (const failure & error) {
        if (error.status == S2MOE_ERROR_ABORTED) {
            count();
            throw;
        }
        disable(error.status == S2MOE_ERROR_CONTEXT_FULL ? "context_full" : "error", error.what());
    } catch (const std::exception & error) {
        disable("error", error.what());
    }
    tree.used = true; // also if it failed: experts may be on their way, so the step is no plain one
    count();
    return tree;
}

draft_view speculator::evaluate_draft(drafter & by, int parent, llama_token token) {
    const auto begun_at = clock::now();
    draft_view view = by.evaluate(parent, token);
    const double seconds = seconds_since(begun_at);
    average(learnt->draft_seconds, seconds);
    draft_costs.observe({1, by.n_used_experts(), 0}, seconds);
    n_decodes += by.is_shared();
    return view;
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
    const int n_nodes = room(position, n_max);
    const pins until_the_end(*this);
    drafted_tree tree;
    if (may_draft(n_nodes) && (!is_paced() || learnt->pacing.begin_step(may_pay()))) {
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
    unpin();
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
    (tree.nodes.empty() ? counters.plain_durations : counters.verify_durations).add(verify_seconds);
    s2moe_expert_stats after = {};
    if (experts != nullptr) {
        experts->stats(after);
        counters.stall_seconds += after.stall_seconds[S2MOE_PHASE_DECODE] - before.stall_seconds[S2MOE_PHASE_DECODE];
    }
    ++n_decodes;
    if (gated) {
        count_experts(tree, verify_seconds);
    } else {
        count_ungated(before, after, tree.used, verify_seconds);
    }
    commit(tree, path, gated);
    history.push_back(root);
    for (const int node : path) {
        history.push_back(tree.nodes[node].token);
    }
    ++counters.n_steps;
    counters.n_tokens += static_cast<int64_t>(tokens.size());
    const double seconds = seconds_since(begun_at);
    if (is_paced()) {
        // what other steps left to do tells nothing of this one
        const double backlog = tree.used ? active_drafter().backlog_seconds() : 0;
        learnt->pacing.end_step(tree.used, static_cast<int>(tokens.size()), seconds - backlog);
        if (tree.used) {
            learnt->pacing.note_admitted(static_cast<int>(tree.nodes.size()));
        }
    } else if (options.method == draft_method::cascade && tells_of_length(tree, n_nodes)) {
        learnt->lengths.end_step(static_cast<int>(tokens.size()), seconds);
    }
    return tokens;
}

// For a model without a speculator's means.
std::vector<llama_token> speculator::step_plainly(llama_token root, llama_pos position, const chooser & choose) {
    const auto begun_at = clock::now();
    token_batch batch;
    batch.add(root, position, {0}, true);
    run_batch(ctx, batch, position, 1, decode_kind::by_width, experts);
    const double verify_seconds = seconds_since(begun_at);
    std::vector<llama_token> tokens;
    const auto sample_at = clock::now();
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
    counters.sample_seconds += seconds_since(sample_at);
    counters.verify_seconds += verify_seconds;
    counters.plain_durations.add(verify_seconds);
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
            learnt->confidences.observe(tree.nodes[i].confidence, tree.nodes[i].depth, accepted);
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

} // namespace s2moe

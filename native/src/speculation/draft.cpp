#include "draft.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include "error.h"
#include "llama-moe.h"

namespace s2moe {

namespace {

constexpr size_t candidates_max = 4;
constexpr int sum_block = 1024;

// exp(x) for x <= 0 to a relative 2e-4, without branches, so that loops over a vocabulary become vector code: std::exp
// would cost a tenth of a draft.
inline float fast_exp(float x) {
    const float t = std::max(-126.0F, x * 1.44269504F); // -126 for NaN, too
    const auto whole = static_cast<int32_t>(t) - 1;     // t <= 0 is truncated upwards
    const float f = t - static_cast<float>(whole);      // 0 < f <= 1 or a little more than that
    const float power = 1.0F + f * (0.69583356F + f * (0.22606716F + f * 0.07802467F));
    return power * std::bit_cast<float>((whole + 127) << 23);
}

// Restores the number of experts and takes the gate out, whatever happens.
struct draft_mode {
    draft_mode(llama_context * ctx, expert_gate & gate, int k) : ctx(ctx), gate(gate) {
        gate.begin_draft(k);
        llama_moe_set_n_expert_used(ctx, k);
    }
    ~draft_mode() {
        llama_moe_set_n_expert_used(ctx, 0);
        gate.end();
    }
    draft_mode(const draft_mode &) = delete;
    draft_mode & operator=(const draft_mode &) = delete;

    llama_context * ctx;
    expert_gate & gate;
};

} // namespace

drafter::drafter(llama_context * ctx, expert_cache * experts, bool shared, int n_sequences)
    : ctx(ctx), experts(experts), shared(shared), n_sequences(n_sequences), gate(ctx, experts), graphs(ctx) {
}

void drafter::feed(std::vector<llama_token> tokens) {
    if (shared) {
        return;
    }
    size_t n_same = 0;
    while (n_same < std::min(tokens.size(), n_evaluated) && tokens[n_same] == committed[n_same]) {
        ++n_same;
    }
    if (n_same < n_evaluated) {
        llama_memory_seq_rm(llama_get_memory(ctx), 0, static_cast<llama_pos>(n_same), -1);
        n_evaluated = n_same;
    }
    committed = std::move(tokens);
}

// Evaluates what was committed since, in a context of its own.
void drafter::catch_up(llama_pos until) {
    if (static_cast<size_t>(until) != committed.size()) {
        throw failure(S2MOE_ERROR_INVALID,
                      "drafts with a context of their own need the committed tokens: " +
                          std::to_string(committed.size()) + " were told, " + std::to_string(until) + " are there");
    }
    const size_t n_batch = llama_n_ubatch(ctx);
    while (n_evaluated < committed.size()) {
        const size_t n = std::min(n_batch, committed.size() - n_evaluated);
        token_batch batch;
        for (size_t i = 0; i < n; ++i) {
            batch.add(committed[n_evaluated + i], static_cast<llama_pos>(n_evaluated + i), {0}, i == n - 1);
        }
        const draft_mode mode(ctx, gate, k_draft);
        run_batch(ctx, batch, static_cast<llama_pos>(n_evaluated), 1, decode_kind::draft, experts);
        n_evaluated += n;
    }
}

void drafter::begin(llama_token first, llama_pos at, int n_expert_used) {
    root = first;
    position = at;
    k_draft = n_expert_used;
    nodes.clear();
    n_used_sequences = 1;
    backlog = 0;
    if (!shared) {
        const size_t n_before = n_evaluated;
        const auto begun_at = std::chrono::steady_clock::now();
        catch_up(at);
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun_at;
        const auto n = static_cast<double>(n_evaluated - n_before);
        backlog = seconds.count() * (1 - std::min(1.0, S2MOE_N_VERIFY_ROWS / std::max(1.0, n)));
    }
}

draft_view drafter::evaluate(int parent, llama_token token) {
    llama_memory_t memory = llama_get_memory(ctx);
    node next;
    if (parent >= 0) {
        node & above = nodes.at(parent);
        next.depth = above.depth + 1;
        next.sequence = above.sequence;
        if (above.extended) {
            if (n_used_sequences == n_sequences) {
                throw std::length_error("more leaves than the context has sequences");
            }
            next.sequence = n_used_sequences++;
            llama_memory_seq_cp(memory, above.sequence, next.sequence, -1, position + above.depth + 1);
        }
        above.extended = true;
    } else {
        token = root;
    }
    token_batch batch;
    batch.add(token, position + next.depth, {next.sequence}, true);
    {
        const auto use = graphs.of(0);
        const draft_mode mode(ctx, gate, k_draft);
        run_batch(ctx, batch, position + next.depth, 0, decode_kind::draft, experts);
        gate.collect(1);
    }
    nodes.push_back(next);
    return look();
}

// The softmax over the whole vocabulary, of which only the best are kept.
draft_view drafter::look() const {
    const float * logits = llama_get_logits_ith(ctx, -1);
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    draft_view view;
    view.predicted = gate.rows().front().exact;
    view.likely = gate.rows().front().likely;
    float top = -INFINITY;
    for (int i = 0; i < n_vocab; ++i) {
        top = std::max(top, logits[i]);
    }
    if (!(std::abs(top) < INFINITY)) {
        throw failure(S2MOE_ERROR_NUMERIC, "the draft computed logits that are no finite numbers");
    }
    double sum = 0;
    for (int begin = 0; begin < n_vocab; begin += sum_block) { // in single precision, but not for long
        float part = 0;
        for (int i = begin; i < std::min(begin + sum_block, n_vocab); ++i) {
            part += fast_exp(logits[i] - top);
        }
        sum += static_cast<double>(part);
    }
    if (!(sum < INFINITY)) {
        throw failure(S2MOE_ERROR_NUMERIC, "the draft computed logits that are no finite numbers");
    }
    std::vector<std::pair<float, int32_t>> best; // ascending
    float least = -INFINITY;
    for (int i = 0; i < n_vocab; ++i) {
        if (!(logits[i] > least)) {
            continue;
        }
        const std::pair<float, int32_t> candidate(logits[i], i);
        best.insert(
            std::upper_bound(
                best.begin(), best.end(), candidate, [](const auto & a, const auto & b) { return a.first < b.first; }),
            candidate);
        if (best.size() > candidates_max) {
            best.erase(best.begin());
            least = best.front().first;
        }
    }
    for (auto each = best.rbegin(); each != best.rend(); ++each) {
        view.next.emplace_back(each->second, std::exp(static_cast<double>(each->first - top)) / sum);
    }
    return view;
}

void drafter::end() {
    llama_memory_t memory = llama_get_memory(ctx);
    for (llama_seq_id s = 1; s < n_used_sequences; ++s) {
        llama_memory_seq_rm(memory, s, -1, -1);
    }
    llama_memory_seq_rm(memory, 0, position, -1);
    nodes.clear();
    n_used_sequences = 0;
}

} // namespace s2moe

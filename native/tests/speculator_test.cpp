// Speculative decoding of a stored model, also while other threads ask the cache and abort.

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <string>
#include <utility>

#include "stored_model.h"

namespace {

constexpr int32_t n_answer = 40;

struct drafting_model : stored_model {
    s2moe_speculator * speculator = nullptr;
    std::function<void()> on_abort = [] {}; // while an answer is being made

    explicit drafting_model(double share) : stored_model("", share, 256, S2MOE_N_DRAFT_SEQUENCES) {
        int32_t status = 1;
        speculator = s2moe_speculator_create(ctx.get(), nullptr, nullptr, &status);
        CHECK(speculator != nullptr && status == S2MOE_OK);
    }
    ~drafting_model() {
        s2moe_speculator_free(speculator);
    }
    drafting_model(const drafting_model &) = delete;
    drafting_model & operator=(const drafting_model &) = delete;

    s2moe_sampler * prefill() const {
        const auto prompt = tokens(9);
        clear();
        int32_t status = S2MOE_ERROR_ABORTED;
        while (status == S2MOE_ERROR_ABORTED) {
            status = s2moe_decode(ctx.get(), prompt.data(), 8, 0, false);
            if (status == S2MOE_ERROR_ABORTED) {
                on_abort();
            }
        }
        CHECK(status == S2MOE_OK);
        s2moe_sampler * sampler = s2moe_sampler_create(model.get(), R"({"temperature": 0})", nullptr, nullptr);
        CHECK(sampler != nullptr);
        return sampler;
    }

    // Greedy tokens behind a prompt, one decode each.
    std::vector<int32_t> plain() const {
        s2moe_sampler * sampler = prefill();
        std::vector<int32_t> result;
        int32_t token = tokens(9).back();
        for (int32_t i = 0; i < n_answer; ++i) {
            CHECK(s2moe_decode(ctx.get(), &token, 1, 8 + i, false) == S2MOE_OK);
            CHECK(s2moe_sampler_sample(sampler, ctx.get(), -1, &token) == S2MOE_OK);
            result.push_back(token);
        }
        s2moe_sampler_free(sampler);
        return result;
    }

    // The same in steps; a step that was aborted is tried again.
    std::vector<int32_t> speculative(const char * options) const {
        s2moe_sampler * sampler = prefill();
        CHECK(s2moe_speculator_begin(speculator, options) == S2MOE_OK);
        std::vector<int32_t> result;
        int32_t root = tokens(9).back();
        int32_t position = 8;
        while (static_cast<int32_t>(result.size()) < n_answer) {
            int32_t chosen[S2MOE_N_VERIFY_ROWS] = {};
            int32_t n = 0;
            const int32_t left = n_answer - static_cast<int32_t>(result.size());
            const int32_t status = s2moe_speculator_step(speculator, sampler, root, position, left, chosen, &n);
            llama_memory_t memory = llama_get_memory(ctx.get());
            CHECK(llama_memory_seq_pos_max(memory, 0) == position + (status == S2MOE_OK ? n : 0) - 1);
            CHECK(llama_memory_seq_pos_max(memory, 1) == -1);
            if (status == S2MOE_ERROR_ABORTED) {
                on_abort();
                continue;
            }
            CHECK(status == S2MOE_OK);
            result.insert(result.end(), chosen, chosen + n);
            position += n;
            root = result.back();
        }
        s2moe_sampler_free(sampler);
        return result;
    }

    std::string text_of(const std::function<int32_t(char **)> & call) const {
        char * text = nullptr;
        CHECK(call(&text) == S2MOE_OK);
        std::string result = text;
        s2moe_string_free(text);
        return result;
    }
};

constexpr const char * exact = R"({"preset": "exact", "adaptive": false})";

void test_exact_steps_give_plain_tokens() {
    for (const double share : {0.0, 0.5, 1.0}) {
        const drafting_model m(share);
        const auto expected = m.plain();
        CHECK(m.speculative(exact) == expected);
        CHECK(m.speculative(R"({"preset": "exact"})") == expected);
        CHECK(m.speculative(R"({"method": "cascade"})") == expected);
    }
}

void test_gated_steps_keep_their_books() {
    const drafting_model m(0.3);
    for (const char * options : {R"({"preset": "balanced", "adaptive": false})", R"({"preset": "fast"})"}) {
        m.speculative(options);
        const std::string report = m.text_of([&](char ** text) { return s2moe_speculator_report(m.speculator, text); });
        CHECK(number_in(report, "n_committed_rows") == n_answer);
        CHECK(number_in(report, "n_biased_rows") > 0);
        const double displaced = number_in(report, "displaced_weight");
        CHECK(displaced > 0 && displaced <= number_in(report, "error_budget") * number_in(report, "n_token_layers"));
        const s2moe_committed_row * rows = nullptr;
        int32_t n_rows = 0;
        CHECK(s2moe_speculator_rows(m.speculator, &rows, &n_rows) == S2MOE_OK);
        CHECK(n_rows >= 1 && rows[0].depth == 0);
    }
    const std::string state = m.text_of([&](char ** text) { return s2moe_speculator_state(m.speculator, text); });
    s2moe_speculator * again = s2moe_speculator_create(m.ctx.get(), nullptr, state.c_str(), nullptr);
    CHECK(again != nullptr);
    CHECK(m.text_of([&](char ** text) { return s2moe_speculator_state(again, text); }) == state);
    s2moe_speculator_free(again);
}

void test_other_threads_ask_and_abort() {
    drafting_model m(0.2);
    const auto expected = m.plain();
    s2moe_abort * abort = s2moe_abort_create(m.ctx.get());
    std::atomic<bool> done = false;
    std::thread asking([&] {
        std::vector<uint8_t> mask(m.info().n_expert);
        while (!done) {
            CHECK(s2moe_experts_residency(m.experts, 0, mask.data(), static_cast<int32_t>(mask.size())) == S2MOE_OK);
            m.stats();
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
    });
    int32_t n_aborted = 0;
    for (int32_t i = 0; i < 5; ++i) {
        abort_storm storm(abort);
        int32_t n_left = 40; // then the storm ends, or a slow machine would never finish a step
        m.on_abort = [&] {
            ++n_aborted;
            if (--n_left == 0) {
                storm.end();
            }
        };
        CHECK(m.speculative(exact) == expected);
        m.on_abort = [] {};
    }
    CHECK(n_aborted > 0);
    done = true;
    asking.join();
    CHECK(m.speculative(exact) == expected);
    s2moe_abort_free(abort);
}

using resident_set = std::vector<std::pair<int32_t, int32_t>>; // layer, expert; in order

// Waits for reads under way.
resident_set resident_experts(const stored_model & m) {
    while (true) {
        resident_set result;
        bool is_quiet = true;
        std::vector<uint8_t> mask(m.info().n_expert);
        for (int32_t layer = 0; layer < m.n_moe_layer(); ++layer) {
            CHECK(s2moe_experts_residency(m.experts, layer, mask.data(), static_cast<int32_t>(mask.size())) ==
                  S2MOE_OK);
            for (size_t expert = 0; expert < mask.size(); ++expert) {
                is_quiet = is_quiet && mask[expert] != S2MOE_IN_FLIGHT;
                if (mask[expert] == S2MOE_RESIDENT) {
                    result.emplace_back(layer, static_cast<int32_t>(expert));
                }
            }
        }
        if (is_quiet) {
            return result;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
}

// Reads ahead everything that is not in memory, one by one; returns what stayed in memory all the same.
resident_set after_filling_the_cache(const stored_model & m) {
    const resident_set before = resident_experts(m);
    for (const s2moe_expert_id & id : m.everything()) {
        if (!std::binary_search(before.begin(), before.end(), std::pair(id.layer, id.expert))) {
            CHECK(s2moe_experts_prefetch(m.experts, &id, 1, S2MOE_PRIORITY_PREFETCH, nullptr) == S2MOE_OK);
            resident_experts(m);
        }
    }
    CHECK(m.everything().size() >= 2 * before.size()); // enough to take every slot
    resident_set both;
    const resident_set after = resident_experts(m);
    std::set_intersection(before.begin(), before.end(), after.begin(), after.end(), std::back_inserter(both));
    return both;
}

// What a step pins for its verification can be evicted again, at whichever moment the step is aborted.
void test_aborted_steps_leave_nothing_pinned() {
    const drafting_model m(0);
    m.plain(); // reads something
    const auto count_down = [](void * n_left) { return --*static_cast<int32_t *>(n_left) < 0; };
    int32_t n_aborted = 0;
    for (int32_t n_calls = 1;; n_calls += 41) {
        s2moe_sampler * sampler = m.prefill();
        CHECK(s2moe_speculator_begin(m.speculator, exact) == S2MOE_OK);
        int32_t n_left = n_calls;
        int32_t chosen[S2MOE_N_VERIFY_ROWS] = {};
        int32_t n = 0;
        llama_set_abort_callback(m.ctx.get(), count_down, &n_left);
        const int32_t status =
            s2moe_speculator_step(m.speculator, sampler, m.tokens(9).back(), 8, n_answer, chosen, &n);
        llama_set_abort_callback(m.ctx.get(), nullptr, nullptr);
        s2moe_sampler_free(sampler);
        if (status == S2MOE_OK) {
            break;
        }
        CHECK(status == S2MOE_ERROR_ABORTED);
        ++n_aborted;
        for (int32_t i = 0; i < 3; ++i) { // until what was read ahead is not kept any more
            const int32_t token = m.tokens(9).back();
            CHECK(s2moe_decode(m.ctx.get(), &token, 1, 8 + i, false) == S2MOE_OK);
        }
        CHECK(after_filling_the_cache(m).empty());
    }
    CHECK(n_aborted > 4);
    // the check sees what is pinned
    const auto [layer, expert] = resident_experts(m).front();
    const s2moe_expert_id id = {layer, expert};
    CHECK(s2moe_experts_pin(m.experts, &id, 1) == S2MOE_OK);
    CHECK((after_filling_the_cache(m) == resident_set{{layer, expert}}));
}

} // namespace

int main() {
    s2moe_set_batch_invariance(S2MOE_N_VERIFY_ROWS);
    test_exact_steps_give_plain_tokens();
    test_gated_steps_keep_their_books();
    test_other_threads_ask_and_abort();
    test_aborted_steps_leave_nothing_pinned();
    return 0;
}

// The speculator's part of s2moe.h.

#include <algorithm>
#include <memory>
#include <span>
#include <string>

#include "decode.h"
#include "error.h"
#include "json.h"
#include "llama-moe.h"
#include "s2moe-repack.h"
#include "s2moe.h"
#include "speculation/speculator.h"

using s2moe::failure;
using s2moe::guard;

struct s2moe_speculator {
    s2moe::speculator impl;
};

void s2moe_set_batch_invariance(int32_t n_rows) {
    s2moe_invariant_rows = std::max(0, n_rows);
}

int32_t s2moe_speculator_limits(const llama_model * model, char ** limits_json) {
    return guard(S2MOE_ERROR_NO_MEMORY, [&] {
        const bool draftable = llama_moe_model_is_draftable(model);
        std::string reason;
        if (!draftable) {
            reason = llama_moe_model_n_moe_layer(model) == 0
                         ? "the model has no experts, of which a draft could use fewer"
                         : "the model keeps a recurrent state, which cannot be rolled back when a draft is rejected";
        }
        const common_json limits = {{"method", draftable ? "s2moe" : "off"}, {"width", draftable}, {"reason", reason}};
        *limits_json = s2moe::copy_string(limits.dump());
    });
}

int32_t s2moe_gate_select(const s2moe_gate_settings * settings,
                          int32_t n_rows,
                          int32_t n_expert,
                          int32_t k,
                          int32_t kind,
                          const float * scores,
                          const float * weights,
                          const uint8_t * residency,
                          const double * prefixes,
                          const double * allowances,
                          int32_t * exact,
                          int32_t * chosen,
                          double * displaced) {
    return guard(S2MOE_ERROR_NO_MEMORY, [&] {
        const s2moe::gate_settings native = {.budget = settings->error_budget,
                                             .strength = settings->reuse_strength,
                                             .residency_weight = settings->residency_weight,
                                             .cap = settings->reuse_cap,
                                             .single_token_bias = settings->single_token_bias};
        const s2moe::gate_input input = {.n_rows = n_rows,
                                         .n_expert = n_expert,
                                         .k = k,
                                         .scores = scores,
                                         .weights = weights,
                                         .kind = kind,
                                         .residency = {residency, static_cast<size_t>(n_expert)}};
        const auto rows = static_cast<size_t>(n_rows);
        const auto choices = s2moe::choose_experts(native, input, {prefixes, rows}, {allowances, rows});
        std::fill_n(exact, n_rows * k, -1);
        std::fill_n(chosen, n_rows * k, -1);
        for (int b = 0; b < n_rows; ++b) {
            std::copy(choices[b].exact.begin(), choices[b].exact.end(), exact + b * k);
            std::copy(choices[b].chosen.begin(), choices[b].chosen.end(), chosen + b * k);
            displaced[b] = choices[b].displaced;
        }
    });
}

s2moe_speculator * s2moe_speculator_create(llama_context * ctx,
                                           llama_context * draft_ctx,
                                           const char * state_json,
                                           int32_t * last_status) {
    std::unique_ptr<s2moe_speculator> made;
    const int32_t status = guard(
        S2MOE_ERROR_INTERNAL, [&] { made.reset(new s2moe_speculator{s2moe::speculator(ctx, draft_ctx, state_json)}); });
    if (last_status != nullptr) {
        *last_status = status;
    }
    return made.release();
}

void s2moe_speculator_free(s2moe_speculator * speculator) {
    delete speculator;
}

int32_t s2moe_speculator_begin(s2moe_speculator * speculator, const char * options_json) {
    return guard(S2MOE_ERROR_INVALID, [&] { speculator->impl.begin(options_json); });
}

int32_t s2moe_speculator_feed(s2moe_speculator * speculator, const int32_t * tokens, int32_t n_tokens) {
    return guard(S2MOE_ERROR_NO_MEMORY,
                 [&] { speculator->impl.feed(std::span(tokens, static_cast<size_t>(std::max(0, n_tokens)))); });
}

int32_t s2moe_speculator_step(s2moe_speculator * speculator,
                              s2moe_sampler * sampler,
                              int32_t root,
                              int32_t position,
                              int32_t n_max,
                              int32_t * tokens,
                              int32_t * n_tokens) {
    return guard(S2MOE_ERROR_INTERNAL, [&] {
        const auto chosen = speculator->impl.step(root, position, n_max, [&](int32_t index) {
            int32_t token = 0;
            const int32_t status = s2moe_sampler_sample(sampler, speculator->impl.context(), index, &token);
            if (status != S2MOE_OK) {
                throw failure(static_cast<s2moe_status>(status), s2moe_last_error());
            }
            return token;
        });
        std::copy(chosen.begin(), chosen.end(), tokens);
        *n_tokens = static_cast<int32_t>(chosen.size());
    });
}

int32_t s2moe_speculator_follow(s2moe_speculator * speculator,
                                int32_t root,
                                int32_t position,
                                const int32_t * text,
                                int32_t n_text,
                                int32_t * n_tokens) {
    return guard(S2MOE_ERROR_INTERNAL, [&] {
        if (n_text < 1) {
            throw failure(S2MOE_ERROR_INVALID, "n_text must be at least 1");
        }
        int32_t n_chosen = 0;
        const auto chosen = speculator->impl.step(root, position, n_text, [&](int32_t) { return text[n_chosen++]; });
        *n_tokens = static_cast<int32_t>(chosen.size());
    });
}

int32_t
s2moe_speculator_rows(const s2moe_speculator * speculator, const s2moe_committed_row ** rows, int32_t * n_rows) {
    *rows = speculator->impl.rows().data();
    *n_rows = static_cast<int32_t>(speculator->impl.rows().size());
    return S2MOE_OK;
}

int32_t s2moe_speculator_report(const s2moe_speculator * speculator, char ** report_json) {
    return guard(S2MOE_ERROR_NO_MEMORY, [&] { *report_json = s2moe::copy_string(speculator->impl.report()); });
}

int32_t s2moe_speculator_state(const s2moe_speculator * speculator, char ** state_json) {
    return guard(S2MOE_ERROR_NO_MEMORY, [&] { *state_json = s2moe::copy_string(speculator->impl.state()); });
}

// Log probabilities under the model's own distribution.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "error.h"
#include "llama.h"
#include "s2moe.h"

using s2moe::failure;

namespace {

constexpr int32_t n_top_max = 100;
constexpr float lowest = -9999; // JSON has no infinity

// Logarithm of the sum of the exponentials of logits [n]; throws where they are no distribution.
double log_sum(const float * logits, int32_t n) {
    float largest = -INFINITY;
    for (int32_t i = 0; i < n; ++i) {
        if (std::isnan(logits[i])) {
            throw failure(S2MOE_ERROR_NUMERIC, "a logit is not a number");
        }
        largest = std::max(largest, logits[i]);
    }
    if (!std::isfinite(largest)) {
        throw failure(S2MOE_ERROR_NUMERIC, "the logits are infinite");
    }
    double sum = 0;
    for (int32_t i = 0; i < n; ++i) {
        sum += std::exp(static_cast<double>(logits[i]) - largest);
    }
    return largest + std::log(sum);
}

} // namespace

int32_t s2moe_logprobs(llama_context * ctx,
                       int32_t index,
                       int32_t token,
                       float * logprob,
                       int32_t n_top,
                       int32_t * top_tokens,
                       float * top_logprobs) {
    return s2moe::guard(S2MOE_ERROR_INTERNAL, [&] {
        const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
        if (token < 0 || token >= n_vocab) {
            throw failure(S2MOE_ERROR_INVALID, "token " + std::to_string(token) + " is not in the vocabulary");
        }
        if (n_top < 0 || n_top > n_top_max) {
            throw failure(S2MOE_ERROR_INVALID, "n_top must be between 0 and " + std::to_string(n_top_max));
        }
        const float * logits = llama_get_logits_ith(ctx, index);
        if (logits == nullptr) {
            throw failure(S2MOE_ERROR_INVALID, "no logits at index " + std::to_string(index));
        }
        const double total = log_sum(logits, n_vocab);
        const auto logprob_of = [&](int32_t i) {
            return std::max(lowest, static_cast<float>(static_cast<double>(logits[i]) - total));
        };
        *logprob = logprob_of(token);
        std::vector<int32_t> order(n_vocab);
        std::iota(order.begin(), order.end(), 0);
        const int32_t n = std::min(n_top, n_vocab);
        std::partial_sort(order.begin(), order.begin() + n, order.end(), [&](int32_t a, int32_t b) {
            return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
        });
        for (int32_t i = 0; i < n; ++i) {
            top_tokens[i] = order[i];
            top_logprobs[i] = logprob_of(order[i]);
        }
        for (int32_t i = n; i < n_top; ++i) { // a vocabulary smaller than that
            top_tokens[i] = -1;
            top_logprobs[i] = lowest;
        }
    });
}

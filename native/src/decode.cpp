#include "decode.h"

#include <cmath>
#include <exception>
#include <string>
#include <vector>

#include "error.h"
#include "experts/matmul.h"
#include "llama-moe.h"
#include "llama.h"
#include "s2moe.h"

using s2moe::failure;

namespace {

void check_arguments(llama_context * ctx, const int32_t * tokens, int32_t n_tokens, int32_t position) {
    const auto n_max = static_cast<int32_t>(llama_n_ubatch(ctx));
    if (tokens == nullptr || n_tokens < 1 || n_tokens > n_max || position < 0) {
        throw failure(S2MOE_ERROR_INVALID,
                      "n_tokens is " + std::to_string(n_tokens) + " at position " + std::to_string(position) +
                          ", allowed are 1 to " + std::to_string(n_max) + " tokens from position 0 on");
    }
    const auto n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    for (int32_t i = 0; i < n_tokens; ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab) {
            throw failure(S2MOE_ERROR_INVALID, "token " + std::to_string(tokens[i]) + " is not in the vocabulary");
        }
    }
    const llama_pos last = llama_memory_seq_pos_max(llama_get_memory(ctx), 0);
    if (last != position - 1) {
        throw failure(S2MOE_ERROR_INVALID,
                      "the KV cache ends at position " + std::to_string(last) + ", not at " +
                          std::to_string(position - 1));
    }
}

[[noreturn]] void throw_decode_failure(int32_t result, int32_t n_tokens) {
    switch (result) {
    case 1:
        throw failure(S2MOE_ERROR_CONTEXT_FULL,
                      "no room in the KV cache for " + std::to_string(n_tokens) + " more tokens");
    case 2:
        throw failure(S2MOE_ERROR_ABORTED, "aborted");
    case -2:
        throw failure(S2MOE_ERROR_NO_MEMORY, "out of memory for the compute buffers");
    default:
        throw failure(S2MOE_ERROR_INTERNAL, "llama_decode failed with code " + std::to_string(result));
    }
}

} // namespace

namespace s2moe {

void token_batch::add(llama_token token,
                      llama_pos position,
                      std::vector<llama_seq_id> sequence_ids,
                      bool wants_logits) {
    tokens.push_back(token);
    positions.push_back(position);
    sequences.push_back(std::move(sequence_ids));
    logits.push_back(wants_logits);
}

expert_cache * experts_of(llama_context * ctx) {
    return cache_of(llama_moe_model_expert_tensor(llama_get_model(ctx)));
}

// Returns what llama_decode() does, or throws what it or the experts do; in any case nothing computes any more then.
static int32_t decode_to_the_end(llama_context * ctx, const llama_batch & batch, expert_cache * experts) {
    int32_t result = 0;
    std::exception_ptr thrown;
    try {
        result = llama_decode(ctx, batch);
    } catch (...) {
        thrown = std::current_exception();
    }
    llama_synchronize(ctx); // a GPU may still compute, from slots that must stay as they are
    if (experts != nullptr) {
        experts->end_decode(); // its failure explains more than llama_decode's
    }
    if (thrown != nullptr) {
        std::rethrow_exception(thrown);
    }
    return result;
}

void run_batch(llama_context * ctx,
               token_batch & batch,
               llama_pos first,
               int n_sequences,
               decode_kind kind,
               expert_cache * experts) {
    const auto n_tokens = static_cast<int32_t>(batch.tokens.size());
    std::vector<int32_t> n_seq_ids;
    std::vector<llama_seq_id *> seq_ids;
    for (auto & ids : batch.sequences) {
        n_seq_ids.push_back(static_cast<int32_t>(ids.size()));
        seq_ids.push_back(ids.data());
    }
    const llama_batch view = {n_tokens,
                              batch.tokens.data(),
                              nullptr,
                              batch.positions.data(),
                              n_seq_ids.data(),
                              seq_ids.data(),
                              batch.logits.data()};
    if (experts != nullptr) {
        experts->begin_decode(kind);
    }
    try {
        const int32_t result = decode_to_the_end(ctx, view, experts);
        if (result != 0) {
            throw_decode_failure(result, n_tokens);
        }
    } catch (...) {
        for (llama_seq_id s = 0; s < n_sequences; ++s) {
            llama_memory_seq_rm(llama_get_memory(ctx), s, first, -1); // whatever part of it got in
        }
        throw;
    }
}

// Damaged weights and overflows show in the logits: then no token can be chosen.
void check_logits(llama_context * ctx, int32_t index) {
    const float * logits = llama_get_logits_ith(ctx, index);
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    for (int32_t i = 0; logits != nullptr && i < n_vocab; ++i) {
        if (!(std::abs(logits[i]) < INFINITY)) {
            throw failure(S2MOE_ERROR_NUMERIC,
                          "the model computed a logit that is no finite number; its weights may be damaged");
        }
    }
}

} // namespace s2moe

int32_t s2moe_decode(llama_context * ctx, const int32_t * tokens, int32_t n_tokens, int32_t position, bool all_logits) {
    return s2moe::guard(S2MOE_ERROR_INTERNAL, [&] {
        llama_moe_forget_recorded(ctx);
        check_arguments(ctx, tokens, n_tokens, position);
        s2moe::token_batch batch;
        for (int32_t i = 0; i < n_tokens; ++i) {
            batch.add(tokens[i], position + i, {0}, all_logits || i == n_tokens - 1);
        }
        s2moe::run_batch(ctx, batch, position, 1, s2moe::decode_kind::by_width, s2moe::experts_of(ctx));
        try {
            s2moe::check_logits(ctx, -1);
        } catch (...) {
            llama_memory_seq_rm(llama_get_memory(ctx), 0, position, -1);
            throw;
        }
    });
}

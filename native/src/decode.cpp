#include <atomic>
#include <cmath>
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

// The arrays of one llama_batch for sequence 0.
struct batch_arrays {
    std::vector<llama_token> tokens;
    std::vector<llama_pos> positions;
    std::vector<int32_t> n_seq_ids;
    llama_seq_id seq_id = 0;
    std::vector<llama_seq_id *> seq_ids;
    std::vector<int8_t> logits;

    batch_arrays(const int32_t * ids, int32_t n, int32_t position, bool all_logits)
        : tokens(ids, ids + n), positions(n), n_seq_ids(n, 1), seq_ids(n, &seq_id), logits(n, all_logits) {
        for (int32_t i = 0; i < n; ++i) {
            positions[i] = position + i;
        }
        logits.back() = true;
    }

    llama_batch view() {
        return {static_cast<int32_t>(tokens.size()),
                tokens.data(),
                nullptr,
                positions.data(),
                n_seq_ids.data(),
                seq_ids.data(),
                logits.data()};
    }
};

// Damaged weights and overflows show in the logits: then no token can be chosen.
void check_logits(llama_context * ctx) {
    const float * logits = llama_get_logits_ith(ctx, -1);
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    for (int32_t i = 0; logits != nullptr && i < n_vocab; ++i) {
        if (!(std::abs(logits[i]) < INFINITY)) {
            throw failure(S2MOE_ERROR_NUMERIC,
                          "the model computed a logit that is no finite number; its weights may be damaged");
        }
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

int32_t s2moe_decode(llama_context * ctx, const int32_t * tokens, int32_t n_tokens, int32_t position, bool all_logits) {
    return s2moe::guard(S2MOE_ERROR_INTERNAL, [&] {
        llama_moe_forget_recorded(ctx);
        check_arguments(ctx, tokens, n_tokens, position);
        batch_arrays arrays(tokens, n_tokens, position, all_logits);
        s2moe::expert_cache * experts = s2moe::cache_of(llama_moe_model_expert_tensor(llama_get_model(ctx)));
        if (experts != nullptr) {
            experts->begin_decode();
        }
        try {
            const int32_t result = llama_decode(ctx, arrays.view());
            if (experts != nullptr) {
                experts->end_decode(); // its failure explains more than llama_decode's
            }
            if (result != 0) {
                throw_decode_failure(result, n_tokens);
            }
            check_logits(ctx);
        } catch (...) {
            llama_memory_seq_rm(llama_get_memory(ctx), 0, position, -1); // whatever part of it got in
            throw;
        }
    });
}

struct s2moe_abort {
    std::atomic<bool> requested = false;
};

s2moe_abort * s2moe_abort_create(llama_context * ctx) {
    s2moe_abort * abort = nullptr;
    s2moe::guard(S2MOE_ERROR_NO_MEMORY, [&] { abort = new s2moe_abort; });
    if (abort != nullptr) {
        llama_set_abort_callback(
            ctx,
            [](void * data) { return static_cast<s2moe_abort *>(data)->requested.load(std::memory_order_relaxed); },
            abort);
    }
    return abort;
}

void s2moe_abort_free(s2moe_abort * abort) {
    delete abort;
}

void s2moe_abort_request(s2moe_abort * abort) {
    abort->requested.store(true, std::memory_order_relaxed);
}

void s2moe_abort_clear(s2moe_abort * abort) {
    abort->requested.store(false, std::memory_order_relaxed);
}

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "error.h"
#include "llama.h"
#include "s2moe.h"

using s2moe::fail;

int32_t s2moe_decode(llama_context * ctx, const int32_t * tokens, int32_t n_tokens, int32_t position, bool all_logits) {
    const auto n_max = static_cast<int32_t>(llama_n_ubatch(ctx));
    if (tokens == nullptr || n_tokens < 1 || n_tokens > n_max || position < 0) {
        return fail(S2MOE_ERROR_INVALID,
                    "n_tokens is " + std::to_string(n_tokens) + " at position " + std::to_string(position) +
                        ", allowed are 1 to " + std::to_string(n_max) + " tokens from position 0 on");
    }
    const auto n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    for (int32_t i = 0; i < n_tokens; ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab) {
            return fail(S2MOE_ERROR_INVALID, "token " + std::to_string(tokens[i]) + " is not in the vocabulary");
        }
    }
    llama_memory_t memory = llama_get_memory(ctx);
    if (llama_memory_seq_pos_max(memory, 0) != position - 1) {
        return fail(S2MOE_ERROR_INVALID,
                    "the KV cache ends at position " + std::to_string(llama_memory_seq_pos_max(memory, 0)) +
                        ", not at " + std::to_string(position - 1));
    }
    std::unique_ptr<llama_batch, void (*)(llama_batch *)> batch(new llama_batch(llama_batch_init(n_tokens, 0, 1)),
                                                                [](llama_batch * b) {
                                                                    llama_batch_free(*b);
                                                                    delete b;
                                                                });
    batch->n_tokens = n_tokens;
    for (int32_t i = 0; i < n_tokens; ++i) {
        batch->token[i] = tokens[i];
        batch->pos[i] = position + i;
        batch->n_seq_id[i] = 1;
        batch->seq_id[i][0] = 0;
        batch->logits[i] = all_logits || i == n_tokens - 1;
    }
    int32_t result = 0;
    const int32_t status = s2moe::guard(S2MOE_ERROR_INTERNAL, [&] { result = llama_decode(ctx, *batch); });
    if (status == S2MOE_OK && result == 0) {
        return S2MOE_OK;
    }
    llama_memory_seq_rm(memory, 0, position, -1); // whatever part of it got in
    switch (result) {
    case 0:
        return status;
    case 1:
        return fail(S2MOE_ERROR_CONTEXT_FULL,
                    "no room in the KV cache for " + std::to_string(n_tokens) + " more tokens");
    case 2:
        return fail(S2MOE_ERROR_ABORTED, "aborted");
    case -2:
        return fail(S2MOE_ERROR_NO_MEMORY, "out of memory for the compute buffers");
    default:
        return fail(S2MOE_ERROR_INTERNAL, "llama_decode failed with code " + std::to_string(result));
    }
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

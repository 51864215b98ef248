// One llama_decode() of a single micro-batch, with the expert cache told about it.

#pragma once

#include <cstdint>
#include <vector>

#include "experts/cache.h"
#include "llama.h"

namespace s2moe {

// The arrays of one llama_batch.
struct token_batch {
    std::vector<llama_token> tokens;
    std::vector<llama_pos> positions;
    std::vector<std::vector<llama_seq_id>> sequences; // of each token
    std::vector<int8_t> logits;                       // whether they are wanted

    void add(llama_token token, llama_pos position, std::vector<llama_seq_id> sequence_ids, bool wants_logits);
};

// The cache of ctx's experts, nullptr if they are in ordinary memory or there are none.
expert_cache * experts_of(llama_context * ctx);

/*
 * Evaluates the batch. On an error every position from `first` on is taken out of every sequence, and failure is thrown
 * with the statuses of s2moe_decode().
 *
 *   n_sequences  that the context has
 */
void run_batch(llama_context * ctx,
               token_batch & batch,
               llama_pos first,
               int n_sequences,
               decode_kind kind,
               expert_cache * experts);

// Throws failure(S2MOE_ERROR_NUMERIC) unless all logits of row `index` are finite.
void check_logits(llama_context * ctx, int32_t index);

} // namespace s2moe

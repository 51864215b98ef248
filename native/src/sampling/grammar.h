// The grammar of an answer, from the JSON of s2moe_sampler_create().

#pragma once

#include "common.h"
#include "json.h"

namespace s2moe {

// Fills the fields of `out` that concern the grammar. Throws failure (S2MOE_ERROR_GRAMMAR or
// S2MOE_ERROR_INVALID), llama_grammar_too_ambiguous and llama_grammar_aborted.
void read_grammar(const llama_vocab * vocab, const common_json & params, common_params_sampling & out);

} // namespace s2moe

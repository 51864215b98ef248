// How one answer is drafted and verified.

#pragma once

#include <string>

#include "gate.h"

namespace s2moe {

enum class draft_method { off, s2moe, expert_skip, cascade };

struct speculation_options {
    draft_method method = draft_method::s2moe;
    std::string preset = "balanced"; // "custom" when one of its values was overridden
    gate_settings gate;              // budget 0: exact
    int draft_experts = 1;
    int max_nodes = 7; // 14 for expert-skip
    bool adaptive = true;
    bool shared_context = true;
    bool prefetch = true;
    bool samples = false; // of the cost model, in the report

    // Answers with the same key take the same times: what was learnt of one is true of the others.
    std::string regime_key() const;
};

/*
 * Reads the JSON object of s2moe_speculator_begin(). Throws failure(S2MOE_ERROR_INVALID), its message beginning with
 * the key at fault.
 *
 *   k           experts per token of the model
 *   n_expert    of a layer
 */
speculation_options read_options(const char * json, int k, int n_expert);

const char * method_name(draft_method method);

} // namespace s2moe

// Why llama.cpp refuses a grammar, for whom it is from.

#pragma once

#include <string>

#include "llama.h"

namespace s2moe {

struct grammar_fault {
    std::string place; // "line 2, column 7, in the rule `item`"; "" where it has none
    std::string reason;

    std::string text() const {
        return place.empty() ? reason : place + ": " + reason;
    }
};

/*
 * The fault of a grammar for which llama_grammar_init_impl() returned nothing. Lines and columns count from 1, columns
 * in characters. The text names rules, so it is for the client and not for a log.
 *
 *   vocab  as llama_grammar_init_impl() got it
 */
grammar_fault find_grammar_fault(const llama_vocab * vocab, const std::string & grammar);

// "line 2, column 7"
std::string place_in(const std::string & grammar, size_t offset);

// ", in the rule `item`" to go behind it; "" without a name
std::string in_rule(const std::string & name);

} // namespace s2moe

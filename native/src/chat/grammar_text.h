// GBNF grammars as text.

#pragma once

#include <string>

namespace s2moe {

// The grammar with `prefix` before the name of every rule.
std::string prefix_rules(const std::string & grammar, const std::string & prefix);

// A grammar of what either grammar allows.
std::string either_grammar(const std::string & a, const std::string & b);

// The grammar with another rule as its root; the rule `root` itself is left out.
std::string with_root(const std::string & grammar, const std::string & rule);

// Throws failure (S2MOE_ERROR_GRAMMAR), beginning with `name`, for a grammar that llama.cpp would not accept.
void check_generated_grammar(const std::string & grammar, const std::string & name);

// Whether the empty text is of the grammar, which must be one that llama.cpp accepts.
bool accepts_nothing(const std::string & grammar);

} // namespace s2moe

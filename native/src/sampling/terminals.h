// The literals, character classes and tokens of a GBNF grammar.

#pragma once

#include <optional>
#include <string>

#include "grammar_fault.h"
#include "llama.h"

namespace s2moe {

/*
 * The first of them that no answer can ever hold; nothing if there is none. llama.cpp takes such a grammar, and then
 * allows no further token, or leaves the class out.
 *
 *   grammar  one that llama_grammar_init_impl() takes
 */
std::optional<grammar_fault> find_terminal_fault(const llama_vocab * vocab, const std::string & grammar);

} // namespace s2moe

// Names of rules in the text of a GBNF grammar.

#pragma once

#include <string>

namespace s2moe {

// The rule's name that begins at `begin`; "" if none does.
std::string rule_name_at(const std::string & grammar, size_t begin);

// Where the literal, character class, token, repetition or comment that begins at `begin` ends; `begin` if none does.
size_t end_of_opaque(const std::string & grammar, size_t begin);

enum class rule_place { mention, definition };

// Where the rule is mentioned or defined first; std::string::npos if nowhere.
size_t find_rule(const std::string & grammar, const std::string & name, rule_place wanted);

} // namespace s2moe

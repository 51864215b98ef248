#include "rule_names.h"

#include <algorithm>
#include <cctype>

namespace s2moe {
namespace {

bool is_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-';
}

} // namespace

std::string rule_name_at(const std::string & grammar, size_t begin) {
    size_t end = begin;
    while (end < grammar.size() && is_word(grammar[end])) {
        ++end;
    }
    return end == begin ? "" : grammar.substr(begin, end - begin);
}

size_t end_of_opaque(const std::string & grammar, size_t begin) {
    const char open = grammar[begin];
    if (open == '#') {
        return std::min(grammar.find_first_of("\r\n", begin), grammar.size());
    }
    const char close = open == '"' ? '"' : open == '[' ? ']' : open == '<' ? '>' : '}';
    if (open != '"' && open != '[' && open != '<' && open != '{') {
        return begin;
    }
    const bool has_escapes = open == '"' || open == '[';
    size_t i = begin + 1;
    for (; i < grammar.size() && grammar[i] != close; ++i) {
        i += has_escapes && grammar[i] == '\\';
    }
    return std::min(i + 1, grammar.size());
}

size_t find_rule(const std::string & grammar, const std::string & name, rule_place wanted) {
    for (size_t i = 0; i < grammar.size();) {
        const size_t end = end_of_opaque(grammar, i);
        const std::string word = end == i ? rule_name_at(grammar, i) : "";
        if (!word.empty() && word == name) {
            const size_t next = grammar.find_first_not_of(" \t", i + word.size());
            const bool is_definition = next != std::string::npos && grammar.compare(next, 3, "::=") == 0;
            if (is_definition || wanted == rule_place::mention) {
                return i;
            }
        }
        i = std::max({end, i + word.size(), i + 1});
    }
    return std::string::npos;
}

} // namespace s2moe

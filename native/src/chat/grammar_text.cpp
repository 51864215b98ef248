#include "grammar_text.h"

#include <algorithm>
#include <cctype>
#include <memory>
#include <stdexcept>

#include "error.h"
#include "llama-grammar.h"

namespace s2moe {
namespace {

bool is_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-';
}

// Where the literal, character class, token, repetition or comment that begins at `begin` ends; `begin` if none does.
size_t end_of_opaque(const std::string & grammar, size_t begin) {
    const char open = grammar[begin];
    const char close = open == '"' ? '"' : open == '[' ? ']' : open == '<' ? '>' : open == '{' ? '}' : '\n';
    if (open != '"' && open != '[' && open != '<' && open != '{' && open != '#') {
        return begin;
    }
    size_t i = begin + 1;
    for (; i < grammar.size() && grammar[i] != close; ++i) {
        i += grammar[i] == '\\' && open != '#';
    }
    return std::min(i + 1, grammar.size());
}

using grammar_ptr = std::unique_ptr<llama_grammar, decltype(&llama_grammar_free_impl)>;

grammar_ptr parse_grammar(const std::string & grammar) {
    grammar_ptr parsed(llama_grammar_init_impl(nullptr, grammar.c_str(), "root", false, nullptr, 0, nullptr, 0),
                       llama_grammar_free_impl);
    if (parsed == nullptr) {
        throw std::runtime_error("llama.cpp cannot read the grammar of it");
    }
    return parsed;
}

} // namespace

std::string prefix_rules(const std::string & grammar, const std::string & prefix) {
    std::string out;
    for (size_t i = 0; i < grammar.size();) {
        size_t end = end_of_opaque(grammar, i);
        if (end == i && is_word(grammar[i])) {
            while (end < grammar.size() && is_word(grammar[end])) {
                ++end;
            }
            out += prefix;
        }
        end = std::max(end, i + 1);
        out.append(grammar, i, end - i);
        i = end;
    }
    return out;
}

std::string either_grammar(const std::string & a, const std::string & b) {
    return "root ::= a-root | b-root\n" + prefix_rules(a, "a-") + "\n" + prefix_rules(b, "b-");
}

std::string with_root(const std::string & grammar, const std::string & rule) {
    const std::string text = "\n" + grammar;
    const size_t begin = text.find("\nroot ::= ");
    const size_t end = begin == std::string::npos ? begin : text.find('\n', begin + 1);
    return text.substr(1, begin) + "root ::= " + rule + (end == std::string::npos ? "\n" : text.substr(end));
}

void check_generated_grammar(const std::string & grammar, const std::string & name) {
    try {
        parse_grammar(grammar);
    } catch (const std::exception & e) {
        throw failure(S2MOE_ERROR_GRAMMAR, name + (name.empty() ? "" : ": ") + e.what());
    }
}

bool accepts_nothing(const std::string & grammar) {
    const grammar_ptr parsed = parse_grammar(grammar);
    return std::any_of(
        parsed->stacks.begin(), parsed->stacks.end(), [](const llama_grammar_stack & stack) { return stack.empty(); });
}

} // namespace s2moe

#include "grammar_text.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "error.h"
#include "llama-grammar.h"
#include "sampling/grammar_fault.h"
#include "sampling/rule_names.h"

namespace s2moe {
namespace {

using grammar_ptr = std::unique_ptr<llama_grammar, decltype(&llama_grammar_free_impl)>;

grammar_ptr parse_grammar(const std::string & grammar) {
    grammar_ptr parsed(llama_grammar_init_impl(nullptr, grammar.c_str(), "root", false, nullptr, 0, nullptr, 0),
                       llama_grammar_free_impl);
    if (parsed == nullptr) {
        // a place in a text that the client never saw would not help
        throw std::runtime_error("llama.cpp cannot read the grammar of it: " +
                                 find_grammar_fault(nullptr, grammar).reason);
    }
    return parsed;
}

} // namespace

std::string prefix_rules(const std::string & grammar, const std::string & prefix) {
    std::string out;
    for (size_t i = 0; i < grammar.size();) {
        size_t end = end_of_opaque(grammar, i);
        const size_t n_name = end == i ? rule_name_at(grammar, i).size() : 0;
        if (n_name > 0) {
            out += prefix;
        }
        end = std::max({end, i + n_name, i + 1});
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

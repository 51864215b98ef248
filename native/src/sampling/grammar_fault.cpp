#include "grammar_fault.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <vector>

#include "llama-grammar.h"
#include "rule_names.h"

namespace s2moe {
namespace {

constexpr size_t shown_name_bytes = 64;
constexpr size_t shown_rules = 8;
constexpr std::string_view undefined_rule = "Undefined rule identifier '"; // llama.cpp's words, with the name behind

bool begins_with(const std::string & text, std::string_view start) {
    return text.compare(0, start.size(), start) == 0;
}

std::string line_of(const std::string & grammar, size_t offset) {
    const auto begin = grammar.begin();
    return "line " + std::to_string(1 + std::count(begin, begin + static_cast<std::ptrdiff_t>(offset), '\n'));
}

std::string quoted(const std::string & name) {
    return "`" + name.substr(0, shown_name_bytes) + (name.size() > shown_name_bytes ? "..." : "") + "`";
}

grammar_fault undefined(const std::string & grammar, const std::string & name) {
    const size_t at = find_rule(grammar, name, rule_place::mention);
    return {at == std::string::npos ? "" : place_in(grammar, at), "the rule " + quoted(name) + " is not defined"};
}

// Behind an operator that repeats nothing, llama.cpp names what follows.
size_t operator_before(const std::string & grammar, size_t offset) {
    while (offset > 0 && std::isspace(static_cast<unsigned char>(grammar[offset - 1])) != 0) {
        --offset;
    }
    return offset > 0 ? offset - 1 : 0;
}

// llama.cpp says "REASON at REST OF THE GRAMMAR", or only why.
grammar_fault parse_fault(const llama_grammar_parser & parser, const std::string & grammar) {
    std::string reason = parser.error;
    if (begins_with(reason, undefined_rule)) {
        return undefined(grammar, reason.substr(undefined_rule.size(), reason.size() - undefined_rule.size() - 1));
    }
    std::string place = line_of(grammar, parser.error_at);
    const size_t split = reason.find(" at ");
    if (begins_with(reason, "invalid token")) {
        reason = "what stands in <> must be one token of the vocabulary";
    } else if (begins_with(reason, "sto")) { // std::stoul and std::stoull say no more
        reason = "a number is too large";
    } else if (split != std::string::npos) {
        const size_t n_rest = reason.size() - split - 4;
        reason.resize(split);
        const size_t at = grammar.size() - std::min(n_rest, grammar.size());
        place = place_in(grammar, begins_with(reason, "expecting preceding") ? operator_before(grammar, at) : at);
    }
    const std::string rule = rule_name_at(grammar, parser.error_at);
    return {place + in_rule(rule), reason};
}

// Looks for a rule that begins with itself, as llama.cpp does: empty may be what has an alternative without elements.
class recursion_search {
  public:
    explicit recursion_search(const llama_grammar_rules & rules) : rules(rules), states(rules.size(), unseen) {
        for (const llama_grammar_rule & rule : rules) {
            bool is_first = true;
            bool may_be_empty = false;
            for (const llama_grammar_element & element : rule) {
                may_be_empty = may_be_empty || (is_first && is_end(element));
                is_first = is_end(element);
            }
            empty.push_back(may_be_empty);
        }
    }

    // The rules on the way from one to itself; none if there is no such rule.
    std::vector<uint32_t> run() {
        for (uint32_t rule = 0; rule < rules.size(); ++rule) {
            if (visit(rule)) {
                return path;
            }
        }
        return {};
    }

  private:
    enum state { unseen, open, done };

    const llama_grammar_rules & rules;
    std::vector<state> states;
    std::vector<bool> empty;
    std::vector<uint32_t> path;

    static bool is_end(const llama_grammar_element & element) {
        return element.type == LLAMA_GRETYPE_END || element.type == LLAMA_GRETYPE_ALT;
    }

    bool visit(uint32_t rule) {
        if (states[rule] != unseen) {
            if (states[rule] == open) {
                path.erase(path.begin(), std::find(path.begin(), path.end(), rule));
            }
            return states[rule] == open;
        }
        states[rule] = open;
        path.push_back(rule);
        bool is_first = true;
        for (const llama_grammar_element & element : rules[rule]) {
            if (is_first && element.type == LLAMA_GRETYPE_RULE_REF) {
                if (visit(element.value)) {
                    return true;
                }
                is_first = empty[element.value];
            } else {
                is_first = is_end(element);
            }
        }
        path.pop_back();
        states[rule] = done;
        return false;
    }
};

grammar_fault recursion_fault(const llama_grammar_parser & parser, const std::string & grammar) {
    std::vector<std::string> names(parser.symbol_ids.size());
    for (const auto & [name, id] : parser.symbol_ids) {
        names[id] = name.substr(0, name.find('_')); // llama.cpp's own rules, for groups, have names such as item_3
    }
    std::vector<std::string> cycle;
    for (const uint32_t rule : recursion_search(parser.rules).run()) {
        if (std::find(cycle.begin(), cycle.end(), names[rule]) == cycle.end()) {
            cycle.push_back(names[rule]);
        }
    }
    if (cycle.empty()) {
        return {"", "a rule begins with itself (left recursion)"};
    }
    const size_t at = find_rule(grammar, cycle[0], rule_place::definition);
    std::string reason = "the rule " + quoted(cycle[0]) + " begins with itself";
    for (size_t i = 1; i < std::min(cycle.size(), shown_rules); ++i) {
        reason += (i == 1 ? " by way of " : ", ") + quoted(cycle[i]);
    }
    return {at == std::string::npos ? "" : line_of(grammar, at),
            reason + (cycle.size() > shown_rules ? ", ..." : "") + " (left recursion)"};
}

} // namespace

std::string place_in(const std::string & grammar, size_t offset) {
    const size_t newline = offset == 0 ? std::string::npos : grammar.rfind('\n', offset - 1);
    const size_t begin = newline == std::string::npos ? 0 : newline + 1;
    size_t column = 1;
    for (size_t i = begin; i < offset; ++i) {
        column += (static_cast<unsigned char>(grammar[i]) & 0xC0) != 0x80; // not inside a character
    }
    return line_of(grammar, offset) + ", column " + std::to_string(column);
}

std::string in_rule(const std::string & name) {
    return name.empty() ? "" : ", in the rule " + quoted(name);
}

grammar_fault find_grammar_fault(const llama_vocab * vocab, const std::string & grammar) {
    llama_grammar_parser parser(vocab);
    if (!parser.parse(grammar.c_str())) {
        return parse_fault(parser, grammar);
    }
    if (parser.symbol_ids.find("root") == parser.symbol_ids.end()) {
        return {"", "there is no rule `root`, with which an answer begins"};
    }
    return recursion_fault(parser, grammar);
}

} // namespace s2moe

#include "terminals.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "common.h"
#include "rule_names.h"

namespace s2moe {
namespace {

constexpr uint32_t last_character = 0x10FFFF;
constexpr uint32_t first_surrogate = 0xD800; // halves of UTF-16 pairs, which stand for no character
constexpr uint32_t last_surrogate = 0xDFFF;

struct fault_at {
    size_t offset;
    std::string reason;
};

// Whether there are characters from `low` to `high` that a text may hold.
bool holds_text(uint32_t low, uint32_t high) {
    return (low < first_surrogate && high > 0) || (low <= last_character && high > last_surrogate);
}

// The character at `at`, which may be escaped, and where it ends; as llama.cpp's parser reads it.
std::pair<uint32_t, size_t> read_character(const std::string & grammar, size_t at) {
    if (grammar[at] == '\\') {
        const char kind = grammar[at + 1];
        const size_t n_digits = kind == 'x' ? 2 : kind == 'u' ? 4 : kind == 'U' ? 8 : 0;
        if (n_digits > 0) {
            return {std::stoul(grammar.substr(at + 2, n_digits), nullptr, 16), at + 2 + n_digits};
        }
        return {kind == 't' ? '\t' : kind == 'r' ? '\r' : kind == 'n' ? '\n' : kind, at + 2};
    }
    const auto byte_at = [&](size_t i) { return static_cast<unsigned char>(grammar[i]); };
    const uint32_t first = byte_at(at);
    uint32_t value = first < 0xC0 ? first : first < 0xE0 ? first & 0x1F : first < 0xF0 ? first & 0x0F : first & 0x07;
    size_t end = at + 1;
    for (; end < grammar.size() && (byte_at(end) & 0xC0) == 0x80; ++end) {
        value = (value << 6) | (byte_at(end) & 0x3F);
    }
    return {value, end};
}

std::optional<fault_at> find_in_literal(const std::string & grammar, size_t begin) {
    for (size_t at = begin + 1; grammar[at] != '"';) {
        const auto [value, end] = read_character(grammar, at);
        if (!holds_text(value, value)) {
            char name[16];
            std::snprintf(name, sizeof(name), "U+%04X", value);
            return fault_at{at, std::string("no text holds the character ") + name};
        }
        at = end;
    }
    return std::nullopt;
}

std::optional<fault_at> find_in_class(const std::string & grammar, size_t begin) {
    const bool is_negated = grammar[begin + 1] == '^';
    size_t at = begin + (is_negated ? 2 : 1);
    bool fits = is_negated && grammar[at] != ']';
    while (grammar[at] != ']') {
        const auto [low, end] = read_character(grammar, at);
        const bool is_range = grammar[end] == '-' && grammar[end + 1] != ']';
        const auto [high, range_end] = is_range ? read_character(grammar, end + 1) : std::pair(low, end);
        if (high < low) {
            return fault_at{at, "a range that ends before it begins"};
        }
        fits = fits || holds_text(low, high);
        at = range_end;
    }
    return fits ? std::nullopt : std::optional(fault_at{begin, "a class that holds no character"});
}

std::optional<fault_at> check_token(const llama_vocab * vocab, const std::string & grammar, size_t begin, size_t end) {
    const std::string text = grammar.substr(begin, end - begin);
    const bool is_id = text[1] == '[';
    const auto id = is_id ? std::stoull(text.substr(2)) : 0;
    if (id >= static_cast<uint64_t>(llama_vocab_n_tokens(vocab))) {
        return fault_at{begin, "the vocabulary has no token " + std::to_string(id)};
    }
    const auto token = is_id ? static_cast<llama_token>(id) : common_tokenize(vocab, text, false, true).at(0);
    if (llama_vocab_is_eog(vocab, token)) {
        return fault_at{begin, "a token that ends an answer, which may end where the grammar does: leave it out"};
    }
    return std::nullopt;
}

} // namespace

std::optional<grammar_fault> find_terminal_fault(const llama_vocab * vocab, const std::string & grammar) {
    std::string word;
    std::string rule;
    for (size_t at = 0; at < grammar.size();) {
        const size_t end = end_of_opaque(grammar, at);
        std::optional<fault_at> found;
        if (grammar[at] == '"') {
            found = find_in_literal(grammar, at);
        } else if (grammar[at] == '[') {
            found = find_in_class(grammar, at);
        } else if (grammar[at] == '<' && grammar[at - 1] != '!') {
            found = check_token(vocab, grammar, at, end);
        } else if (grammar.compare(at, 3, "::=") == 0) {
            rule = word;
        }
        if (found) {
            return grammar_fault{place_in(grammar, found->offset) + in_rule(rule), found->reason};
        }
        const std::string name = end == at ? rule_name_at(grammar, at) : "";
        word = name.empty() ? word : name;
        at = std::max({end, at + name.size(), at + 1});
    }
    return std::nullopt;
}

} // namespace s2moe

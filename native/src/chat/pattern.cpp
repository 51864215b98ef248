// Regular expressions of JSON schema, rewritten into the words that llama.cpp's converter knows.

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "schema.h"

namespace s2moe {
namespace {

// What may not stand inside a JSON string as it is, as part of a character class: a grammar matches the text of the
// JSON, so "any character" must not end the string.
const std::string not_in_strings = R"("\\\x00-\x1F)";
const std::string any_character = "[^" + not_in_strings + "]";
// Spaces beside those that \s means here: a class without spaces has to be without them, too.
const std::string other_spaces = R"(\x09-\x0D\u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF)";
constexpr unsigned n_repetitions_max = 2000; // llama.cpp's grammars count so far

std::optional<std::string> escape_outside(char c) {
    switch (c) {
    case 'd':
        return "[0-9]";
    case 'w':
        return "[A-Za-z0-9_]";
    case 's':
        return "[ ]";
    case 'D':
        return "[^0-9" + not_in_strings + "]";
    case 'W':
        return "[^A-Za-z0-9_" + not_in_strings + "]";
    case 'S':
        return "[^ " + other_spaces + not_in_strings + "]";
    case '/':
    case '-':
    case '_':
    case '@':
    case '#':
    case ':':
    case ',':
    case ' ':
        return std::string(1, c);
    default:
        break;
    }
    constexpr std::string_view kept = "^$.[]()|{}*+?";
    return kept.find(c) == std::string_view::npos ? std::nullopt : std::optional("\\" + std::string(1, c));
}

// Character classes.

std::optional<std::string> class_escape(char c, bool is_negated) {
    switch (c) {
    case 'd':
        return "0-9";
    case 'w':
        return "A-Za-z0-9_";
    case 's':
        return " " + (is_negated ? other_spaces : "");
    default:
        return std::nullopt;
    }
}

// Code points from `low` to `high`, as a grammar has them inside a class.
std::string class_range(uint32_t low, uint32_t high) {
    const auto character = [](uint32_t c) {
        std::array<char, 12> text{};
        std::snprintf(text.data(), text.size(), c < 0x80 ? "\\x%02X" : c < 0x10000 ? "\\u%04X" : "\\U%08X", c);
        return std::string(text.data());
    };
    return low > high ? "" : low == high ? character(low) : character(low) + "-" + character(high);
}

// The same without quotes, backslashes and control characters, which stand in no string as they are.
std::string class_range_in_strings(uint32_t low, uint32_t high) {
    std::string out;
    uint32_t begin = std::max<uint32_t>(low, 0x20);
    for (const uint32_t forbidden : {uint32_t{'"'}, uint32_t{'\\'}}) {
        if (begin <= forbidden && forbidden <= high) {
            out += class_range(begin, forbidden - 1);
            begin = forbidden + 1;
        }
    }
    return out + class_range(begin, high);
}

// The character at `i` of a class, and `i` behind it; nothing if grammars do not know it.
std::optional<uint32_t> class_character(std::string_view text, size_t & i) {
    const auto lead = static_cast<unsigned char>(text[i++]);
    if (lead == '\\') {
        const char c = i < text.size() ? text[i++] : '\0';
        if (c == 'x' || c == 'u') {
            const size_t n_digits = c == 'x' ? 2 : 4;
            uint32_t value = 0;
            const char * begin = text.data() + i;
            i += n_digits;
            const bool is_whole =
                i <= text.size() && std::from_chars(begin, begin + n_digits, value, 16).ptr == begin + n_digits;
            return is_whole ? std::optional(value) : std::nullopt;
        }
        constexpr std::string_view controls = "tnvfr"; // U+0009 to U+000D
        if (const size_t k = controls.find(c); k != std::string_view::npos) {
            return static_cast<uint32_t>(0x09 + k);
        }
        constexpr std::string_view plain = ".$()|{}*+?/_@#:, &%!=;~^[]-\"\\'<>`";
        return plain.find(c) == std::string_view::npos ? std::nullopt : std::optional(static_cast<uint32_t>(c));
    }
    const int n_more = lead < 0xC0 ? 0 : lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
    uint32_t value = n_more == 0 ? lead : lead & (0x3FU >> n_more);
    for (int k = 0; k < n_more; ++k) {
        if (i == text.size()) {
            return std::nullopt;
        }
        value = value << 6 | (static_cast<unsigned char>(text[i++]) & 0x3FU);
    }
    return value;
}

// The class that begins at `i`, and `i` at its last character; nothing if it cannot be written, or matches nothing.
std::optional<std::string> portable_class(std::string_view text, size_t & i) {
    const bool is_negated = i + 1 < text.size() && text[i + 1] == '^';
    const std::string start = is_negated ? "[^" + not_in_strings : "[";
    std::string out = start;
    size_t at = i + (is_negated ? 2 : 1);
    while (at < text.size() && text[at] != ']') {
        if (text[at] == '\\' && at + 1 < text.size()) {
            if (const auto set = class_escape(text[at + 1], is_negated)) {
                out += *set;
                at += 2;
                continue;
            }
        }
        const auto low = class_character(text, at);
        auto high = low;
        if (at + 1 < text.size() && text[at] == '-' && text[at + 1] != ']') {
            high = class_character(text, ++at);
        }
        if (!low || !high || *low > *high) {
            return std::nullopt;
        }
        out += is_negated ? class_range(*low, *high) : class_range_in_strings(*low, *high);
    }
    if (at >= text.size() || out == start) {
        return std::nullopt;
    }
    i = at;
    return out + "]";
}

// Whether a repetition, whose brace is at `i`, counts further than llama.cpp does: it drops such a bound.
bool counts_too_far(std::string_view text, size_t i) {
    const size_t end = text.find('}', i);
    while (end != std::string_view::npos && i < end) {
        unsigned count = 0;
        const auto [behind, error] = std::from_chars(text.data() + i, text.data() + end, count);
        if (error == std::errc::result_out_of_range || count > n_repetitions_max) {
            return true;
        }
        i = error == std::errc() ? static_cast<size_t>(behind - text.data()) : i + 1;
    }
    return false;
}

} // namespace

std::string portable_pattern(const std::string & pattern) {
    const bool from_start = !pattern.empty() && pattern.front() == '^';
    const bool to_end = pattern.size() > size_t{from_start} && pattern.back() == '$' &&
                        (pattern.size() < 2 || pattern[pattern.size() - 2] != '\\');
    const std::string_view body =
        std::string_view(pattern).substr(from_start, pattern.size() - size_t{from_start} - size_t{to_end});
    std::string out;
    for (size_t i = 0; i < body.size(); ++i) {
        const char c = body[i];
        if (static_cast<unsigned char>(c) < 0x20 || c == '"' || (c == '{' && counts_too_far(body, i))) {
            return "";
        }
        if (c == '\\' || c == '[') {
            const auto text = c == '['               ? portable_class(body, i)
                              : i + 1 == body.size() ? std::nullopt
                                                     : escape_outside(body[++i]);
            if (!text) {
                return "";
            }
            out += *text;
        } else {
            out += c == '.' ? any_character : std::string(1, c);
        }
    }
    if (from_start && to_end) {
        return "^" + out + "$";
    }
    return "^" + (from_start ? "" : any_character + "*") + "(" + out + ")" + (to_end ? "" : any_character + "*") + "$";
}

} // namespace s2moe

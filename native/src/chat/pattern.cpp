// Regular expressions of JSON schema, rewritten into the words that llama.cpp's converter knows.

#include <optional>
#include <string>
#include <string_view>

#include "schema.h"

namespace s2moe {
namespace {

// What may not stand inside a JSON string as it is, as part of a character class: a grammar matches the text of the
// JSON, so "any character" must not end the string.
const std::string not_in_strings = R"("\\\x00-\x1F)";
const std::string any_character = "[^" + not_in_strings + "]";

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
        return "[^ " + not_in_strings + "]";
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

std::optional<std::string> escape_inside(char c) {
    switch (c) {
    case 'd':
        return "0-9";
    case 'w':
        return "A-Za-z0-9_";
    case 's':
        return " ";
    case ']':
    case '[':
    case '-':
        return "\\" + std::string(1, c);
    default:
        break;
    }
    constexpr std::string_view plain = ".$()|{}*+?/_@#:, &%!=;~";
    return plain.find(c) == std::string_view::npos ? std::nullopt : std::optional(std::string(1, c));
}

} // namespace

std::string portable_pattern(const std::string & pattern) {
    const bool from_start = !pattern.empty() && pattern.front() == '^';
    const bool to_end = pattern.size() > size_t{from_start} && pattern.back() == '$' &&
                        (pattern.size() < 2 || pattern[pattern.size() - 2] != '\\');
    const std::string_view body =
        std::string_view(pattern).substr(from_start, pattern.size() - size_t{from_start} - size_t{to_end});
    std::string out;
    bool in_class = false;
    for (size_t i = 0; i < body.size(); ++i) {
        const char c = body[i];
        if (static_cast<unsigned char>(c) < 0x20 || c == '"') {
            return "";
        }
        if (c == '\\') {
            const auto text = i + 1 == body.size() ? std::nullopt
                              : in_class           ? escape_inside(body[i + 1])
                                                   : escape_outside(body[i + 1]);
            if (!text) {
                return "";
            }
            out += *text;
            ++i;
        } else if (in_class) {
            in_class = c != ']';
            out += c;
        } else if (c == '[') {
            in_class = true;
            out += c;
            if (i + 1 < body.size() && body[i + 1] == '^') {
                out += "^" + not_in_strings;
                ++i;
            }
            if (i + 1 < body.size() && body[i + 1] == ']') {
                return ""; // an empty class here, a literal bracket there
            }
        } else {
            out += c == '.' ? any_character : std::string(1, c);
        }
    }
    if (in_class) {
        return "";
    }
    if (from_start && to_end) {
        return "^" + out + "$";
    }
    return "^" + (from_start ? "" : any_character + "*") + "(" + out + ")" + (to_end ? "" : any_character + "*") + "$";
}

} // namespace s2moe

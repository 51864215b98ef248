#include "schema_pointer.h"

#include <algorithm>
#include <charconv>
#include <string_view>

namespace s2moe {
namespace {

// A percent sign that is followed by no two hexadecimal digits stands for itself: not every client encodes it.
std::string percent_decoded(std::string_view text) {
    std::string out;
    for (size_t i = 0; i < text.size(); ++i) {
        unsigned value = 0;
        const char * digits = text.data() + i + 1;
        if (text[i] == '%' && i + 2 < text.size() && std::from_chars(digits, digits + 2, value, 16).ptr == digits + 2) {
            out += static_cast<char>(value);
            i += 2;
        } else {
            out += text[i];
        }
    }
    return out;
}

std::optional<std::string> unescaped(std::string_view name) {
    std::string out;
    for (size_t i = 0; i < name.size(); ++i) {
        if (name[i] != '~') {
            out += name[i];
            continue;
        }
        ++i;
        if (i == name.size() || (name[i] != '0' && name[i] != '1')) {
            return std::nullopt;
        }
        out += name[i] == '0' ? '~' : '/';
    }
    return out;
}

} // namespace

std::optional<std::vector<std::string>> read_pointer(const std::string & ref) {
    if (ref.empty() || ref[0] != '#') {
        return std::nullopt;
    }
    const std::string text = percent_decoded(std::string_view(ref).substr(1));
    std::vector<std::string> names;
    if (text.empty()) {
        return names;
    }
    if (text[0] != '/') {
        return std::nullopt;
    }
    for (size_t begin = 1; begin <= text.size();) {
        const size_t end = std::min(text.find('/', begin), text.size());
        const auto name = unescaped(std::string_view(text).substr(begin, end - begin));
        if (!name) {
            return std::nullopt;
        }
        names.push_back(*name);
        begin = end + 1;
    }
    return names;
}

std::string pointer_to(const std::vector<std::string> & names) {
    std::string out = "#";
    for (const std::string & name : names) {
        out += "/" + escape_name(name);
    }
    return out;
}

std::string escape_name(const std::string & name) {
    std::string out;
    for (const char c : name) {
        out += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
    }
    return out;
}

} // namespace s2moe

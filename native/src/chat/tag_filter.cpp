#include "tag_filter.h"

#include <algorithm>

namespace s2moe {

size_t count_characters(std::string_view text) {
    return static_cast<size_t>(
        std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

size_t begun_tag_bytes(std::string_view text, const std::vector<std::string> & tags) {
    size_t longest = 0;
    for (const std::string & tag : tags) {
        size_t n = std::min(tag.size() - 1, text.size());
        while (n > longest && text.substr(text.size() - n) != std::string_view(tag).substr(0, n)) {
            --n;
        }
        longest = std::max(longest, n);
    }
    return longest;
}

namespace {

struct place {
    size_t begin = std::string::npos;
    size_t n_bytes = 0;
};

// Where the first of the tags stands.
place find_first(const std::string & text, const std::vector<std::string> & tags) {
    place first;
    for (const std::string & tag : tags) {
        const size_t begin = text.find(tag);
        if (begin < first.begin) {
            first = {begin, tag.size()};
        }
    }
    return first;
}

} // namespace

std::string tag_filter::feed(std::string_view text, bool final) {
    std::string out;
    if (has_ended) {
        return out;
    }
    held.append(text);
    while (true) {
        const place tag = find_first(held, tags);
        const place end = find_first(held, ends);
        if (end.begin < tag.begin) {
            has_ended = true;
            out.append(held, 0, end.begin);
            held.clear();
            return out;
        }
        if (tag.begin == std::string::npos) {
            break;
        }
        out.append(held, 0, tag.begin);
        held.erase(0, tag.begin + tag.n_bytes);
    }
    const size_t n_begun = std::max(begun_tag_bytes(held, tags), begun_tag_bytes(held, ends));
    out.append(held, 0, held.size() - n_begun);
    held.erase(0, held.size() - n_begun);
    if (final) {
        out += count_characters(held) <= n_held_shown_max ? held : "";
        held.clear();
    }
    return out;
}

} // namespace s2moe

// Takes tags out of streamed text.

#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace s2moe {

// Characters at the end of an answer that count as text though they may begin a tag; more is a tag that was cut off.
constexpr size_t n_held_shown_max = 1;

size_t count_characters(std::string_view text);

// How many bytes at the end of the text are the beginning of one of the tags, and not all of it.
size_t begun_tag_bytes(std::string_view text, const std::vector<std::string> & tags);

class tag_filter {
  public:
    // Of `tags` only themselves are taken out; of `ends`, all that follows, too.
    tag_filter(std::vector<std::string> tags, std::vector<std::string> ends)
        : tags(std::move(tags)), ends(std::move(ends)) {
    }

    bool holds_something() const {
        return !held.empty();
    }

    // Returns what may be shown of the text, as far as that is certain. final: all of it is.
    std::string feed(std::string_view text, bool final);

  private:
    std::vector<std::string> tags;
    std::vector<std::string> ends;
    std::string held;
    bool has_ended = false;
};

} // namespace s2moe

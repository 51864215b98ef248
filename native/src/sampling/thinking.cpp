#include "thinking.h"

#include <algorithm>

namespace s2moe {
namespace {

constexpr size_t tail_bytes = 256; // longer than any tag

} // namespace

std::optional<thinking_gate> thinking_gate::read(const common_json & params, const common_params_sampling & sampling) {
    if (sampling.grammar.type != COMMON_GRAMMAR_TYPE_USER || sampling.grammar_lazy || !params.contains("thinking") ||
        params.at("thinking").is_null()) {
        return std::nullopt;
    }
    const common_json & about = params.at("thinking");
    thinking_gate gate;
    gate.state = about.at("is_open").get<bool>() ? thinking : undecided;
    gate.start = about.at("start").get<std::string>();
    gate.content_starts = about.at("content_starts").get<std::vector<std::string>>();
    return gate;
}

bool thinking_gate::admits(const std::string & piece, bool is_end) {
    if (state == undecided) {
        const size_t n = std::min(start.size(), piece.size());
        state = n > 0 && !is_end && piece.compare(0, n, start, 0, n) == 0 ? thinking : over;
    }
    return state == thinking;
}

void thinking_gate::follow(const std::string & piece) {
    tail += piece;
    for (const std::string & begin : content_starts) {
        if (tail.find(begin) != std::string::npos) {
            state = over;
        }
    }
    if (tail.size() > tail_bytes) {
        tail.erase(0, tail.size() - tail_bytes);
    }
}

} // namespace s2moe

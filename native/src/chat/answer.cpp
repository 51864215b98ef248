#include "answer.h"

#include <algorithm>
#include <memory>

#include "chat-peg-parser.h"

namespace s2moe {
namespace {

constexpr int depth_max = 200; // of brackets in an answer; the parsers recurse over them
constexpr std::string_view blank = " \t\r\n";

bool starts_with(std::string_view text, std::string_view prefix) {
    return text.substr(0, prefix.size()) == prefix;
}

bool is_inside_character(std::string_view text, size_t at) {
    return at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;
}

// Moves what `now` has beyond `given` to `out`. What was given stays, whatever `now` says.
void give_text(const std::string & now, std::string & given, std::string & out) {
    if (now.size() > given.size() && starts_with(now, given)) {
        out.append(now, given.size());
        given = now;
    }
}

std::vector<std::string> strings(const common_json & list) {
    std::vector<std::string> out;
    for (const common_json & text : list) {
        out.push_back(text.get<std::string>());
    }
    return out;
}

std::unique_ptr<common_chat_peg_mapper> make_mapper(common_chat_format format, common_chat_msg & message) {
    switch (format) {
    case COMMON_CHAT_FORMAT_PEG_GEMMA4:
        return std::make_unique<common_chat_peg_gemma4_mapper>(message);
    case COMMON_CHAT_FORMAT_PEG_MINIMAX_M3:
        return std::make_unique<common_chat_peg_minimax_m3_mapper>(message);
    default:
        return std::make_unique<common_chat_peg_mapper>(message);
    }
}

} // namespace

answer_parser::answer_parser(const common_json & chat)
    : format(static_cast<common_chat_format>(chat.at("format_id").get<int>())),
      prefix(chat.at("answer_prefix").get<std::string>()), markers(strings(chat.at("markers"))),
      thinking_tags(strings(chat.at("thinking_tags"))), has_schema(chat.at("has_schema").get<bool>()),
      may_call_again(chat.at("parallel_tool_calls").get<bool>()),
      content_filter(has_schema ? std::vector<std::string>() : thinking_tags,
                     has_schema ? std::vector<std::string>() : strings(chat.at("call_tags"))) {
    for (const std::string & source : strings(chat.at("parsers"))) {
        parsers.emplace_back().load(source);
    }
    risky = "<>[]{}|`\"\\\t\r\n";
    for (const auto * tags : {&markers, &thinking_tags}) { // call tags are markers, too
        for (const std::string & tag : *tags) {
            risky += tag.front();
        }
    }
    last = read(0);
    content = last.message.content; // of a message that is continued
    reasoning = last.message.reasoning_content;
}

answer_parser::reading answer_parser::read(size_t n_bytes) const {
    const std::string input = prefix + text.substr(0, n_bytes);
    reading out;
    for (const common_peg_arena & parser : parsers) {
        out = read_with(parser, input);
        if (!out.failed) {
            break;
        }
    }
    return out;
}

answer_parser::reading answer_parser::read_with(const common_peg_arena & parser, const std::string & input) const {
    common_peg_parse_context context(input, COMMON_PEG_PARSE_FLAG_LENIENT);
    const common_peg_parse_result result = parser.parse(context);
    reading out;
    out.failed = result.fail();
    out.complete = result.success();
    if (out.failed) {
        return out;
    }
    out.message.role = "assistant";
    make_mapper(format, out.message)->from_ast(context.ast, result);

    using builder = common_chat_peg_builder;
    size_t n_content = 0;
    bool has_late_content = false;
    bool has_arguments = false;
    context.ast.visit(result, [&](const common_peg_ast_node & node) {
        const bool is_content = node.tag == builder::CONTENT;
        if (node.tag == builder::TOOL_OPEN) {
            out.has_early_id.push_back(false);
            has_arguments = false;
        } else if (node.tag == builder::TOOL_ARGS || node.tag == builder::TOOL_ARG) {
            has_arguments = true;
        } else if (node.tag == builder::TOOL_ID && !out.has_early_id.empty() && !has_arguments) {
            out.has_early_id.back() = true;
        } else if (is_content && !out.has_early_id.empty()) {
            has_late_content = true;
        } else if (is_content || node.tag == builder::REASONING) {
            n_content += is_content ? node.sanitized_text().size() : 0;
            out.shown_end = node.end - std::min(node.end, prefix.size());
            out.shown = is_content ? channel::content : channel::reasoning;
        }
    });
    if (has_late_content && n_content < out.message.content.size()) {
        out.message.content.resize(n_content);
    }
    if (!may_call_again && out.message.tool_calls.size() > 1) {
        out.message.tool_calls.resize(1);
    }
    return out;
}

answer_delta answer_parser::feed(std::string_view piece, bool final) {
    answer_delta out = add(piece, final);
    out.content = content_filter.feed(out.content, final || !out.calls.empty());
    return out;
}

answer_delta answer_parser::add(std::string_view piece, bool final) {
    answer_delta out;
    const bool continues = !final && continues_channel(piece);
    text.append(piece);
    count_depth(piece);
    if (is_closed) {
        return out;
    }
    if (is_raw) {
        give_raw(final, out);
        return out;
    }
    if (continues) {
        std::string & shown = last.shown == channel::content ? content : reasoning;
        shown.append(piece);
        (last.shown == channel::content ? out.content : out.reasoning).append(piece);
        good_end = last.shown_end = text.size();
        return out;
    }
    const size_t n_bytes = std::min(text.size(), too_deep_at);
    const reading now = read(n_bytes);
    if (now.failed || n_bytes < text.size()) {
        stop_fitting(now.failed ? good_end : n_bytes, n_bytes, out);
        give_raw(final, out);
        return out;
    }
    give(now, final, out);
    if (final) {
        give_held(now, out);
    }
    good_end = text.size();
    last = now;
    return out;
}

// Whether the piece belongs to the channel that is open, whatever comes next. Saves reading the text again for most
// tokens.
bool answer_parser::continues_channel(std::string_view piece) const {
    const bool is_open =
        last.shown != channel::none && last.message.tool_calls.empty() && last.shown_end == text.size();
    if (is_raw || is_closed || has_schema || !is_open || content_filter.holds_something()) {
        return false;
    }
    if (piece.empty() || piece.back() == ' ') {
        return false;
    }
    const std::string & shown = last.shown == channel::content ? content : reasoning;
    if (shown.empty() || blank.find(shown.back()) != std::string_view::npos) {
        return false;
    }
    return piece.find_first_of(risky) == std::string_view::npos &&
           std::all_of(piece.begin(), piece.end(), [](char c) { return static_cast<unsigned char>(c) >= ' '; });
}

void answer_parser::count_depth(std::string_view piece) {
    for (size_t i = 0; i < piece.size(); ++i) {
        depth += piece[i] == '{' || piece[i] == '[' ? 1 : 0;
        depth -= (piece[i] == '}' || piece[i] == ']') && depth > 0 ? 1 : 0;
        if (depth > depth_max && too_deep_at == std::string::npos) {
            too_deep_at = text.size() - piece.size() + i;
        }
    }
}

void answer_parser::give(const reading & now, bool final, answer_delta & out) {
    give_text(now.message.reasoning_content, reasoning, out.reasoning);
    give_text(now.message.content, content, out.content);
    give_calls(now, final, out);
}

void answer_parser::give_calls(const reading & now, bool final, answer_delta & out) {
    const size_t n = now.message.tool_calls.size();
    for (size_t i = 0; i < n; ++i) {
        const common_chat_tool_call & call = now.message.tool_calls[i];
        const bool is_last = i + 1 == n;
        // the mapper opens the arguments when it sees a name, which the next character may still make longer
        const bool is_opened_only = is_last && !now.complete && call.arguments.size() <= 1;
        if (call.name.empty() || (is_opened_only && !final)) {
            return;
        }
        if (calls.size() <= i) {
            calls.emplace_back();
        }
        given_call & given = calls[i];
        call_delta delta;
        delta.index = i;
        if (!given.named) {
            delta.name = call.name;
            delta.id = i < now.has_early_id.size() && now.has_early_id[i] ? call.id : "";
        }
        give_text(is_opened_only ? "" : call.arguments, given.arguments, delta.arguments);
        if (!given.named || !delta.arguments.empty()) {
            out.calls.push_back(delta);
        }
        given.named = true;
    }
}

// At the end of an answer, for text that might have become markup.
void answer_parser::give_held(const reading & now, answer_delta & out) {
    if (now.complete || has_schema || !now.message.tool_calls.empty()) {
        return;
    }
    const std::string_view held = std::string_view(text).substr(now.shown_end);
    if (held.find_first_not_of(blank) == std::string_view::npos || count_characters(held) > n_held_shown_max) {
        return;
    }
    const bool is_reasoning = now.shown == channel::reasoning;
    (is_reasoning ? out.reasoning : out.content).append(held);
    (is_reasoning ? reasoning : content).append(held);
}

// The first `good` bytes of the text fit, the first `bad` do not: gives out all that does, and makes the rest raw.
void answer_parser::stop_fitting(size_t good, size_t bad, answer_delta & out) {
    while (bad - good > 1) {
        size_t middle = good + (bad - good) / 2;
        while (middle > good && is_inside_character(text, middle)) {
            --middle;
        }
        if (middle == good) {
            middle = good + (bad - good) / 2;
            while (middle < bad && is_inside_character(text, middle)) {
                ++middle;
            }
            if (middle == bad) {
                break;
            }
        }
        (read(middle).failed ? bad : good) = middle;
    }
    last = read(good);
    give(last, /* final */ false, out);
    is_raw = true;
    is_closed = !last.message.tool_calls.empty();
    raw_begin = last.shown_end;
    skip_thinking_tags();
}

void answer_parser::skip_thinking_tags() {
    size_t begin = raw_begin;
    for (bool skipped = true; skipped;) {
        skipped = false;
        begin = std::min(text.find_first_not_of(blank, begin), text.size());
        for (const std::string & tag : thinking_tags) {
            if (starts_with(std::string_view(text).substr(begin), tag)) {
                raw_begin = begin = std::min(text.find_first_not_of(blank, begin + tag.size()), text.size());
                skipped = true;
            }
        }
    }
}

void answer_parser::give_raw(bool final, answer_delta & out) {
    if (is_closed) {
        return;
    }
    const std::string_view rest = std::string_view(text).substr(raw_begin);
    size_t n_shown = rest.size();
    for (const std::string & marker : markers) {
        const size_t at = rest.find(marker);
        if (at != std::string_view::npos) {
            n_shown = std::min(n_shown, at);
            is_closed = true;
        }
    }
    if (!is_closed) {
        n_shown -= begun_tag_bytes(rest, markers);
        if (final && count_characters(rest.substr(n_shown)) <= n_held_shown_max) {
            n_shown = rest.size();
        }
    }
    out.content.append(rest.substr(0, n_shown));
    content.append(rest.substr(0, n_shown));
    raw_begin += n_shown;
}

} // namespace s2moe

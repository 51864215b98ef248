// The parser of one streamed answer: raw text in, pieces of content, reasoning and tool calls out.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "chat.h"
#include "json.h"
#include "peg-parser.h"
#include "tag_filter.h"

namespace s2moe {

struct call_delta {
    size_t index = 0;
    std::string id;
    std::string name;
    std::string arguments;
};

struct answer_delta {
    std::string content;
    std::string reasoning;
    std::vector<call_delta> calls;
};

/*
 * llama.cpp's parsers read a text from its beginning and say what its beginning means; this class feeds them, and gives
 * out what has become certain, each byte once and never to be taken back. What it gives for a text does not depend on
 * how the text was cut.
 *
 * A text that does not fit the format of its template is given out as content from the place on where it stops fitting,
 * up to the first marker of calls behind it. Behind a call, nothing is content any more. Tags of reasoning that stand
 * inside content are taken out of it.
 */
class answer_parser {
  public:
    // `chat`: what s2moe_chat_apply() returned. Throws std::exception for anything else.
    explicit answer_parser(const common_json & chat);

    answer_delta feed(std::string_view piece, bool final);

  private:
    enum class channel { none, content, reasoning };

    // What the first bytes of the answer mean.
    struct reading {
        common_chat_msg message;
        bool failed = false;   // they cannot be the beginning of an answer
        bool complete = false; // they are an answer, whole
        size_t shown_end = 0;  // bytes up to the end of the content or reasoning that ends last
        channel shown = channel::none;
        std::vector<bool> has_early_id; // of each call: whether its id comes before its arguments
    };

    struct given_call {
        bool named = false;
        std::string arguments;
    };

    // Of the request.
    common_chat_format format;
    std::string prefix;                    // what of the answer the prompt holds
    std::vector<common_peg_arena> parsers; // the first that accepts a text reads it
    std::vector<std::string> markers;
    std::vector<std::string> thinking_tags;
    std::string risky; // characters that may begin markup, or that parsers trim
    bool has_schema = false;
    bool may_call_again = false;
    tag_filter content_filter; // of tags of reasoning that stand where no reasoning does

    // Of the answer so far.
    std::string text;
    std::string content;
    std::string reasoning;
    std::vector<given_call> calls;
    reading last;
    size_t good_end = 0; // bytes that were read without failure
    int depth = 0;       // open brackets
    size_t too_deep_at = std::string::npos;
    bool is_raw = false;    // the text has stopped fitting
    bool is_closed = false; // the rest is dropped
    size_t raw_begin = 0;   // of what is held back since

    answer_delta add(std::string_view piece, bool final);
    reading read(size_t n_bytes) const;
    reading read_with(const common_peg_arena & parser, const std::string & input) const;
    bool continues_channel(std::string_view piece) const;
    void count_depth(std::string_view piece);
    void give(const reading & now, bool final, answer_delta & out);
    void give_calls(const reading & now, bool final, answer_delta & out);
    void give_held(const reading & now, answer_delta & out);
    void stop_fitting(size_t good, size_t bad, answer_delta & out);
    void skip_thinking_tags();
    void give_raw(bool final, answer_delta & out);
};

} // namespace s2moe

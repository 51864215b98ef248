// Chat templates and answer parsing: llama.cpp's common library behind JSON.

#include "chat.h"

#include <memory>
#include <string>

#include "common.h"
#include "error.h"
#include "json.h"
#include "llama.h"
#include "log.h"
#include "s2moe.h"

using s2moe::failure;

struct s2moe_chat {
    common_chat_templates_ptr templates;
};

struct s2moe_answer {
    common_chat_parser_params params;
    std::string text;
    common_chat_msg message; // what `text` gave so far
};

namespace {

// Anything that can hold neither reasoning nor calls needs no parser.
constexpr const char * content_only = "content-only";

common_json to_json(const common_chat_params & params) {
    common_json triggers = common_json::array();
    for (const common_grammar_trigger & trigger : params.grammar_triggers) {
        triggers.push_back({
            {"type", static_cast<int>(trigger.type)},
            {"value", trigger.value},
            {"token", static_cast<int64_t>(trigger.token)},
        });
    }
    const bool plain = params.format == COMMON_CHAT_FORMAT_CONTENT_ONLY ||
                       (!params.supports_thinking && params.thinking_start_tag.empty() && params.grammar.empty());
    return {
        {"prompt", params.prompt},
        {"format", plain ? content_only : common_chat_format_name(params.format)},
        {"format_id", static_cast<int>(params.format)},
        {"stops", params.additional_stops},
        {"grammar", params.grammar},
        {"grammar_lazy", params.grammar_lazy},
        {"grammar_triggers", triggers},
        {"preserved_tokens", params.preserved_tokens},
        {"generation_prompt", params.generation_prompt},
        {"parser", params.parser},
    };
}

common_chat_templates_inputs read_request(const common_json & request) {
    common_chat_templates_inputs inputs;
    inputs.messages = common_chat_msgs_parse_oaicompat(request.at("messages"));
    if (inputs.messages.empty()) {
        throw failure(S2MOE_ERROR_INVALID, "messages must not be empty");
    }
    inputs.add_generation_prompt = request.value("add_generation_prompt", true);
    inputs.enable_thinking = request.value("enable_thinking", true);
    inputs.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK;
    return inputs;
}

} // namespace

s2moe_chat * s2moe_chat_create(const llama_model * model, const char * template_override) {
    std::unique_ptr<s2moe_chat> chat;
    s2moe::guard(S2MOE_ERROR_TEMPLATE, [&] {
        common_log_set_verbosity_thold(LOG_LEVEL_ERROR); // its warnings quote answers
        auto made = std::make_unique<s2moe_chat>();
        made->templates = common_chat_templates_init(model, template_override == nullptr ? "" : template_override);
        chat = std::move(made);
    });
    return chat.release();
}

void s2moe_chat_free(s2moe_chat * chat) {
    delete chat;
}

int32_t s2moe_chat_apply(const s2moe_chat * chat, const char * request_json, char ** result_json) {
    return s2moe::guard(S2MOE_ERROR_TEMPLATE, [&] {
        common_chat_templates_inputs inputs;
        try {
            inputs = read_request(common_json::parse(request_json));
        } catch (const failure &) {
            throw;
        } catch (const std::exception & e) {
            throw failure(S2MOE_ERROR_INVALID, e.what());
        }
        const common_chat_params params = common_chat_templates_apply(chat->templates.get(), inputs);
        *result_json = s2moe::copy_string(to_json(params).dump_safe());
    });
}

s2moe_answer * s2moe_answer_create(const char * chat_json) {
    std::unique_ptr<s2moe_answer> answer;
    s2moe::guard(S2MOE_ERROR_INVALID, [&] {
        const common_json chat = common_json::parse(chat_json);
        auto made = std::make_unique<s2moe_answer>();
        made->params.format = static_cast<common_chat_format>(chat.at("format_id").get<int>());
        made->params.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK;
        made->params.generation_prompt = chat.at("generation_prompt").get<std::string>();
        const std::string parser = chat.at("parser").get<std::string>();
        if (!parser.empty()) {
            made->params.parser.load(parser);
        }
        made->message.role = "assistant";
        answer = std::move(made);
    });
    return answer.release();
}

void s2moe_answer_free(s2moe_answer * answer) {
    delete answer;
}

int32_t s2moe_answer_feed(s2moe_answer * answer, const char * text, size_t n_bytes, bool final, char ** delta_json) {
    return s2moe::guard(S2MOE_ERROR_INTERNAL, [&] {
        answer->text.append(text, n_bytes);
        common_chat_msg message;
        try {
            message = common_chat_parse(answer->text, !final, answer->params);
        } catch (const std::exception &) {
            message = answer->message; // not decidable yet: more text will tell
            if (final) {
                // not what the template promises: all of it counts as content, behind what was already given out
                const std::string & given = answer->message.content;
                message.content =
                    answer->text.compare(0, given.size(), given) == 0 ? answer->text : given + answer->text;
            }
        }
        std::string content;
        std::string reasoning;
        for (const common_chat_msg_diff & diff : common_chat_msg_diff::compute_diffs(answer->message, message)) {
            content += diff.content_delta;
            reasoning += diff.reasoning_content_delta;
        }
        *delta_json = s2moe::copy_string(common_json{{"content", content}, {"reasoning", reasoning}}.dump_safe());
        answer->message = std::move(message);
    });
}

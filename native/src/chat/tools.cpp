#include "tools.h"

#include <string>

#include "chat-peg-parser.h"
#include "error.h"
#include "json-schema-to-grammar.h"
#include "json.h"

namespace s2moe {
namespace {

const std::string call_start = "<tool_call>";
const std::string call_end = "</tool_call>";

std::string describe(const common_chat_templates_inputs & inputs, bool with_format) {
    std::string text = "You may call functions. These are available, one JSON object each:\n<tools>\n";
    for (const common_json & tool : common_chat_tools_to_json_oaicompat(inputs.tools)) {
        text += tool.at("function").dump() + "\n";
    }
    text += "</tools>\n";
    if (with_format) {
        text += "To call a function, end your answer with a JSON object of its name and its arguments:\n" + call_start +
                "{\"name\": \"<name>\", \"arguments\": {<arguments>}}" + call_end + "\n";
        text += inputs.parallel_tool_calls ? "Several calls may follow each other.\n" : "Make one call at a time.\n";
    }
    text += "Results come in the next message. Call a function only if it helps.";
    return text;
}

void add_to_system_message(std::vector<common_chat_msg> & messages, const std::string & text) {
    if (!messages.empty() && (messages[0].role == "system" || messages[0].role == "developer")) {
        messages[0].content = messages[0].render_content() + "\n\n" + text;
        messages[0].content_parts.clear();
        return;
    }
    common_chat_msg system;
    system.role = "system";
    system.content = text;
    messages.insert(messages.begin(), system);
}

// Calls and results of a history as text, in roles that every template has.
void write_out_calls(std::vector<common_chat_msg> & messages) {
    std::vector<common_chat_msg> out;
    for (common_chat_msg & message : messages) {
        const bool is_result = message.role == "tool";
        std::string text = message.render_content();
        for (const common_chat_tool_call & call : message.tool_calls) {
            text += (text.empty() ? "" : "\n") + call_start + "{\"name\": " + common_json(call.name).dump() +
                    ", \"arguments\": " + call.arguments + "}" + call_end;
        }
        if (is_result) {
            text = "<tool_response>\n" + text + "\n</tool_response>";
        }
        if (is_result && !out.empty() && out.back().role == "user" && out.back().tool_name == "tool") {
            out.back().content += "\n" + text;
            continue;
        }
        if (is_result || !message.tool_calls.empty()) {
            message.role = is_result ? "user" : message.role;
            message.tool_name = is_result ? "tool" : ""; // marks results until all are joined
            message.content = text;
            message.content_parts.clear();
            message.tool_calls.clear();
            message.tool_call_id.clear();
        } else {
            message.tool_name.clear();
        }
        out.push_back(message);
    }
    for (common_chat_msg & message : out) {
        message.tool_name.clear();
    }
    messages = std::move(out);
}

common_peg_arena build_parser(const common_chat_params & params, const common_chat_templates_inputs & inputs) {
    const common_json tools = common_chat_tools_to_json_oaicompat(inputs.tools);
    const bool required = inputs.tool_choice == COMMON_CHAT_TOOL_CHOICE_REQUIRED;
    return build_chat_peg_parser([&](common_chat_peg_builder & p) {
        auto thinking = p.eps();
        if (!params.thinking_start_tag.empty() && !params.thinking_end_tags.empty()) {
            const std::string & end = params.thinking_end_tags[0];
            thinking = p.optional(p.literal(params.thinking_start_tag) + p.space() + p.reasoning(p.until(end)) +
                                  p.literal(end) + p.space());
        }
        auto call = p.standard_json_tools(call_start, call_end, tools, false, true, "name", "arguments");
        auto calls = inputs.parallel_tool_calls
                         ? p.trigger_rule("tool-calls", call + p.zero_or_more(p.space() + call) + p.space())
                         : p.trigger_rule("tool-calls", call + p.space());
        return p.prefix(params.generation_prompt, params.thinking_start_tag)
               << thinking + p.optional(p.content(p.until(call_start))) + (required ? calls : p.optional(calls)) +
                      p.end();
    });
}

common_chat_params apply_common_format(const common_chat_templates * templates, common_chat_templates_inputs inputs) {
    common_chat_templates_inputs plain = inputs;
    plain.tools.clear();
    plain.tool_choice = COMMON_CHAT_TOOL_CHOICE_NONE;
    write_out_calls(plain.messages);
    add_to_system_message(plain.messages, describe(inputs, /* with_format */ true));
    common_chat_params params = common_chat_templates_apply(templates, plain);
    const common_peg_arena parser = build_parser(params, inputs);
    params.format = COMMON_CHAT_FORMAT_PEG_NATIVE;
    params.parser = parser.save();
    params.grammar_lazy = inputs.tool_choice == COMMON_CHAT_TOOL_CHOICE_AUTO;
    params.grammar = build_grammar(
        [&](const common_grammar_builder & builder) { parser.build_grammar(builder, params.grammar_lazy); });
    params.grammar_triggers.clear();
    if (params.grammar_lazy) {
        params.grammar_triggers.push_back({COMMON_GRAMMAR_TRIGGER_TYPE_WORD, call_start});
    }
    params.preserved_tokens.insert(params.preserved_tokens.end(), {call_start, call_end});
    return params;
}

} // namespace

tool_support find_tool_support(const common_chat_templates * templates) {
    common_chat_templates_inputs inputs;
    inputs.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK;
    common_chat_msg message;
    message.role = "user";
    message.content = "Hello";
    inputs.messages = {message};
    tool_support out;
    try {
        const std::string without = common_chat_templates_apply(templates, inputs).prompt;
        inputs.tools.push_back(
            {"look_up",
             "Looks a word up.",
             R"({"type": "object", "properties": {"word": {"type": "string", "description": "The word."}}})"});
        inputs.tool_choice = COMMON_CHAT_TOOL_CHOICE_REQUIRED;
        const common_chat_params with = common_chat_templates_apply(templates, inputs);
        out.has_calls = !with.grammar.empty();
        out.describes = with.prompt != without;
    } catch (const std::exception &) {
        // a template that cannot do this has no support for tools
    }
    return out;
}

common_chat_params apply_with_tools(const common_chat_templates * templates,
                                    const tool_support & support,
                                    common_chat_templates_inputs inputs) {
    if (inputs.tool_choice == COMMON_CHAT_TOOL_CHOICE_NONE) {
        inputs.tools.clear();
    }
    if (inputs.tools.empty() && support.has_calls) {
        return common_chat_templates_apply(templates, inputs);
    }
    if (!support.has_calls) {
        if (!inputs.tools.empty()) {
            return apply_common_format(templates, inputs);
        }
        write_out_calls(inputs.messages);
        return common_chat_templates_apply(templates, inputs);
    }
    if (!support.describes) {
        add_to_system_message(inputs.messages, describe(inputs, /* with_format */ false));
    }
    common_chat_params params = common_chat_templates_apply(templates, inputs);
    if (inputs.tool_choice == COMMON_CHAT_TOOL_CHOICE_REQUIRED && params.grammar.empty()) {
        throw failure(S2MOE_ERROR_UNSUPPORTED, "the chat template of this model cannot be made to call a tool");
    }
    return params;
}

} // namespace s2moe

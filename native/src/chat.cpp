// Chat templates and answers: llama.cpp's common library behind JSON.

#include "chat.h"

#include <algorithm>
#include <memory>
#include <string>

#include "chat/answer.h"
#include "chat/grammar_text.h"
#include "chat/request.h"
#include "chat/schema.h"
#include "chat/tools.h"
#include "common.h"
#include "error.h"
#include "json-schema-to-grammar.h"
#include "json.h"
#include "llama.h"
#include "log.h"
#include "s2moe.h"

using s2moe::failure;

struct s2moe_chat {
    common_chat_templates_ptr templates;
    s2moe::tool_support tools;
};

struct s2moe_answer {
    s2moe::answer_parser parser;
};

namespace {

// Anything that can hold neither reasoning nor calls needs no parser.
constexpr const char * content_only = "content-only";
// Of gpt-oss: its reasoning and its answer are messages of their own.
const std::string harmony_analysis = "<|channel|>analysis<|message|>";
const std::string harmony_final = "<|channel|>final<|message|>";

// A rendered conversation.
struct rendered {
    common_chat_params params;
    std::vector<std::string> parsers;
    // Whether the grammar begins with what the prompt already holds of the answer. If not, it begins where content
    // does.
    bool is_prefilled = true;
};

// The grammar of calls alone, from one that lets other text come first; "" where calls do not begin an answer.
std::string call_grammar(const common_chat_params & required, bool parallel) {
    if (required.thinking_start_tag == harmony_analysis) {
        return "";
    }
    if (!parallel && required.grammar.find("\ntool-calls ::= (tool-call space)+\n") != std::string::npos) {
        return s2moe::with_root(required.grammar, "tool-call"); // it knows no "one"
    }
    for (const char * rule : {"tool-call-root", "tool-calls", "tool-call"}) {
        if (required.grammar.find("\n" + std::string(rule) + " ::= ") != std::string::npos) {
            const std::string grammar = s2moe::with_root(required.grammar, rule);
            return s2moe::accepts_nothing(grammar) ? "" : grammar;
        }
    }
    return "";
}

// An answer that must be a call, or a call or else what the schema says. llama.cpp has no grammar for the latter, and
// for the former one that lets a model say what it likes for as long as it likes before it calls.
rendered render_forced(const s2moe_chat & chat, const common_chat_templates_inputs & inputs) {
    const auto apply = [&](common_chat_tool_choice choice, bool with_schema) {
        common_chat_templates_inputs wanted = inputs;
        wanted.tool_choice = choice;
        wanted.json_schema = with_schema ? inputs.json_schema : "";
        return s2moe::apply_with_tools(chat.templates.get(), chat.tools, wanted);
    };
    rendered out{apply(COMMON_CHAT_TOOL_CHOICE_REQUIRED, false), {}, true};
    const std::string call = call_grammar(out.params, inputs.parallel_tool_calls);
    out.is_prefilled = call.empty();
    out.parsers = {out.params.parser};
    out.params.grammar_triggers.clear();
    if (inputs.json_schema.empty()) {
        out.params.grammar = call.empty() ? out.params.grammar : call;
        return out;
    }
    const common_chat_params schema = apply(COMMON_CHAT_TOOL_CHOICE_NONE, true);
    if (schema.generation_prompt != out.params.generation_prompt || (call.empty() && schema.grammar.empty())) {
        throw failure(S2MOE_ERROR_UNSUPPORTED, "json_schema and tools do not go together in this chat template");
    }
    out.params.grammar =
        call.empty() ? s2moe::either_grammar(schema.grammar, out.params.grammar)
                     : s2moe::either_grammar(json_schema_to_grammar(common_json::parse(inputs.json_schema)), call);
    out.params.grammar_lazy = false;
    out.parsers.push_back(schema.parser); // the second, since a call may be JSON, too
    return out;
}

rendered render(const s2moe_chat & chat, const common_chat_templates_inputs & inputs) {
    const bool may_call = !inputs.tools.empty() && inputs.tool_choice != COMMON_CHAT_TOOL_CHOICE_NONE;
    if (may_call && (inputs.tool_choice == COMMON_CHAT_TOOL_CHOICE_REQUIRED || !inputs.json_schema.empty())) {
        return render_forced(chat, inputs);
    }
    rendered out{s2moe::apply_with_tools(chat.templates.get(), chat.tools, inputs), {}, true};
    out.parsers = {out.params.parser};
    if (!inputs.json_schema.empty() && out.params.grammar.empty()) { // a template that llama.cpp has no grammar for
        out.params.grammar = json_schema_to_grammar(common_json::parse(inputs.json_schema));
        out.params.grammar_lazy = false;
        out.is_prefilled = false;
    }
    return out;
}

// Tags of reasoning, and of the answer beside it.
std::vector<std::string> find_thinking_tags(const common_chat_params & params) {
    std::vector<std::string> tags = params.thinking_end_tags;
    tags.push_back(params.thinking_start_tag);
    for (const std::string & token : params.preserved_tokens) {
        if (token == "<response>" || token == "</response>") { // of Granite 3.3
            tags.push_back(token);
        }
    }
    tags.erase(std::remove_if(tags.begin(), tags.end(), [](const std::string & tag) { return tag.size() < 3; }),
               tags.end());
    return tags;
}

// What calls begin with: nothing behind it is content.
std::vector<std::string> find_call_tags(const common_chat_params & params) {
    std::vector<std::string> tags;
    for (const common_grammar_trigger & trigger : params.grammar_triggers) {
        const std::string text = string_strip(trigger.value);
        if (trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_WORD && text.size() >= 3) {
            tags.push_back(text);
        }
    }
    return tags;
}

// Texts that are other markup wherever they stand, as that of calls.
std::vector<std::string> find_markers(const common_chat_params & params, const std::vector<std::string> & thinking) {
    std::vector<std::string> markers = find_call_tags(params);
    markers.insert(markers.end(), params.preserved_tokens.begin(), params.preserved_tokens.end());
    const auto is_none = [&](const std::string & text) {
        return text.size() < 3 || std::find(thinking.begin(), thinking.end(), text) != thinking.end();
    };
    markers.erase(std::remove_if(markers.begin(), markers.end(), is_none), markers.end());
    std::sort(markers.begin(), markers.end());
    markers.erase(std::unique(markers.begin(), markers.end()), markers.end());
    return markers;
}

// How a sampler knows reasoning, to leave it free; null for a template without.
common_json describe_thinking(const common_chat_params & params) {
    if (params.thinking_start_tag.empty() || params.thinking_end_tags.empty()) {
        return nullptr;
    }
    const std::string & prompt = params.generation_prompt;
    const size_t start = prompt.rfind(params.thinking_start_tag);
    bool is_open = start != std::string::npos;
    for (const std::string & end : params.thinking_end_tags) {
        is_open = is_open && prompt.find(end, start + params.thinking_start_tag.size()) == std::string::npos;
    }
    const bool is_harmony = params.thinking_start_tag == harmony_analysis;
    return common_json{
        {"start", params.thinking_start_tag},
        {"ends", params.thinking_end_tags},
        {"content_starts", is_harmony ? std::vector{harmony_final} : params.thinking_end_tags},
        {"is_open", is_open},
    };
}

common_json to_json(const rendered & chat, const s2moe::chat_request & request) {
    const common_chat_params & params = chat.params;
    common_json triggers = common_json::array();
    for (const common_grammar_trigger & trigger : params.grammar_triggers) {
        triggers.push_back({
            {"type", static_cast<int>(trigger.type)},
            {"value", trigger.value},
            {"token", static_cast<int64_t>(trigger.token)},
        });
    }
    const common_chat_templates_inputs & inputs = request.inputs;
    const bool may_call = !inputs.tools.empty() && inputs.tool_choice != COMMON_CHAT_TOOL_CHOICE_NONE;
    const bool is_plain = params.format == COMMON_CHAT_FORMAT_CONTENT_ONLY ||
                          (!params.supports_thinking && params.thinking_start_tag.empty() && params.grammar.empty() &&
                           params.preserved_tokens.empty() && !may_call);
    const std::vector<std::string> thinking_tags = find_thinking_tags(params);
    return {
        {"prompt", params.prompt},
        {"format", is_plain ? content_only : common_chat_format_name(params.format)},
        {"format_id", static_cast<int>(params.format)},
        {"stops", params.additional_stops},
        {"grammar", params.grammar},
        {"grammar_lazy", params.grammar_lazy},
        {"grammar_triggers", triggers},
        {"preserved_tokens", params.preserved_tokens},
        {"generation_prompt", chat.is_prefilled ? common_json(params.generation_prompt) : common_json(nullptr)},
        {"answer_prefix", params.generation_prompt},
        {"thinking", describe_thinking(params)},
        {"unenforced", request.unenforced},
        {"parsers", chat.parsers},
        {"markers", find_markers(params, thinking_tags)},
        {"thinking_tags", thinking_tags},
        {"call_tags", find_call_tags(params)},
        {"has_schema", !inputs.json_schema.empty()},
        {"parallel_tool_calls", inputs.parallel_tool_calls},
    };
}

common_json to_json(const s2moe::answer_delta & delta) {
    common_json calls = common_json::array();
    for (const s2moe::call_delta & call : delta.calls) {
        calls.push_back({
            {"index", static_cast<int64_t>(call.index)},
            {"id", call.id},
            {"name", call.name},
            {"arguments", call.arguments},
        });
    }
    return {{"content", delta.content}, {"reasoning", delta.reasoning}, {"tool_calls", calls}};
}

} // namespace

s2moe_chat * s2moe_chat_create(const llama_model * model, const char * template_override) {
    std::unique_ptr<s2moe_chat> chat;
    s2moe::guard(S2MOE_ERROR_TEMPLATE, [&] {
        auto made = std::make_unique<s2moe_chat>();
        made->templates = common_chat_templates_init(model, template_override == nullptr ? "" : template_override);
        common_log_set_verbosity_thold(LOG_LEVEL_OUTPUT); // a template without tools is no error
        made->tools = s2moe::find_tool_support(made->templates.get());
        common_log_set_verbosity_thold(LOG_LEVEL_ERROR); // its warnings quote answers
        chat = std::move(made);
    });
    return chat.release();
}

void s2moe_chat_free(s2moe_chat * chat) {
    delete chat;
}

int32_t s2moe_chat_apply(const s2moe_chat * chat, const char * request_json, char ** result_json) {
    return s2moe::guard(S2MOE_ERROR_TEMPLATE, [&] {
        const s2moe::chat_request request = s2moe::read_chat_request(request_json);
        const rendered result = render(*chat, request.inputs);
        if (!result.params.grammar.empty()) {
            s2moe::check_generated_grammar(result.params.grammar,
                                           request.inputs.json_schema.empty() ? "tools" : "json_schema");
        }
        *result_json = s2moe::copy_string(to_json(result, request).dump_safe());
    });
}

int32_t s2moe_chat_source(const s2moe_chat * chat, char ** source) {
    return s2moe::guard(S2MOE_ERROR_INTERNAL,
                        [&] { *source = s2moe::copy_string(common_chat_templates_source(chat->templates.get())); });
}

s2moe_answer * s2moe_answer_create(const char * chat_json) {
    std::unique_ptr<s2moe_answer> answer;
    s2moe::guard(S2MOE_ERROR_INVALID, [&] {
        const common_json chat = common_json::parse(chat_json);
        answer = std::unique_ptr<s2moe_answer>(new s2moe_answer{s2moe::answer_parser(chat)});
    });
    return answer.release();
}

void s2moe_answer_free(s2moe_answer * answer) {
    delete answer;
}

int32_t s2moe_answer_feed(s2moe_answer * answer, const char * text, size_t n_bytes, bool final, char ** delta_json) {
    return s2moe::guard(S2MOE_ERROR_INTERNAL, [&] {
        const s2moe::answer_delta delta = answer->parser.feed({text, n_bytes}, final);
        *delta_json = s2moe::copy_string(to_json(delta).dump_safe());
    });
}

#include "request.h"

#include <algorithm>
#include <array>
#include <set>

#include "error.h"
#include "schema.h"

namespace s2moe {
namespace {

constexpr int depth_max = 200; // of JSON; parsing, copying and printing it recurse
constexpr size_t n_tools_max = 512;
constexpr size_t tools_bytes_max = 1 << 20;
constexpr size_t schema_bytes_max = 256 << 10;
constexpr size_t tool_name_bytes_max = 128;

[[noreturn]] void reject(const std::string & place, const std::string & what) {
    throw failure(S2MOE_ERROR_INVALID, place + " " + what);
}

std::string indexed(const std::string & list, size_t i) {
    return list + "[" + std::to_string(i) + "]";
}

bool given(const common_json & object, const char * key) {
    return object.contains(key) && !object.at(key).is_null();
}

bool read_bool(const common_json & request, const char * key, bool otherwise) {
    if (!given(request, key)) {
        return otherwise;
    }
    if (!request.at(key).is_boolean()) {
        reject(key, "must be true or false");
    }
    return request.at(key).get<bool>();
}

// Messages.

// Templates may want arguments as objects, so text that is no JSON would fail in some of them only.
void check_arguments(common_json & function, const std::string & place) {
    if (!given(function, "arguments")) {
        function["arguments"] = "{}";
    }
    common_json & arguments = function.at("arguments");
    if (!arguments.is_string()) {
        return;
    }
    const std::string text = arguments.get<std::string>();
    if (text.find_first_not_of(" \t\r\n") == std::string::npos) {
        arguments = common_json("{}");
        return;
    }
    if (json_depth(text) > depth_max) {
        reject(place, "is nested deeper than " + std::to_string(depth_max));
    }
    if (common_json::parse_no_throw(text).is_discarded()) {
        reject(place, "is not JSON");
    }
}

void check_calls(common_json & message, const std::string & place) {
    common_json & calls = message.at("tool_calls");
    if (!calls.is_array()) {
        reject(place + ".tool_calls", "must be a list");
    }
    for (size_t i = 0; i < calls.size(); ++i) {
        const std::string here = indexed(place + ".tool_calls", i);
        common_json & call = calls.at(i);
        if (!call.is_object() || !given(call, "function") || !call.at("function").is_object()) {
            reject(here, "must be a call of a function");
        }
        if (!given(call, "type")) {
            call["type"] = "function";
        }
        check_arguments(call.at("function"), here + ".function.arguments");
    }
}

std::vector<common_chat_msg> read_messages(common_json & request) {
    if (!given(request, "messages") || !request.at("messages").is_array()) {
        reject("messages", "must be a list");
    }
    common_json & messages = request.at("messages");
    if (messages.empty()) {
        reject("messages", "must not be empty");
    }
    for (size_t i = 0; i < messages.size(); ++i) {
        common_json & message = messages.at(i);
        const std::string place = indexed("messages", i);
        if (!message.is_object() || !given(message, "role") || !message.at("role").is_string()) {
            reject(place, "must be an object with a role");
        }
        for (const char * key : {"tool_calls", "name", "tool_call_id", "reasoning_content"}) {
            if (message.contains(key) && (message.at(key).is_null() || message.at(key).empty())) {
                message.erase(key);
            }
        }
        if (message.contains("tool_calls")) {
            check_calls(message, place);
        } else if (!message.contains("content")) {
            reject(place, "must have content or tool_calls");
        }
    }
    try {
        return common_chat_msgs_parse_oaicompat(messages);
    } catch (const std::exception & e) {
        throw failure(S2MOE_ERROR_INVALID, "messages: " + std::string(e.what()).substr(0, 300));
    }
}

// Tools.

bool is_name(const std::string & name) {
    return !name.empty() && name.size() <= tool_name_bytes_max && std::all_of(name.begin(), name.end(), [](char c) {
        return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
               std::string_view("_-.:/").find(c) != std::string::npos;
    });
}

common_chat_tool read_tool(common_json & tool,
                           const std::string & place,
                           schema_budget & budget,
                           std::vector<std::string> & unenforced) {
    if (!tool.is_object() || !given(tool, "function") || !tool.at("function").is_object() ||
        (given(tool, "type") && tool.at("type") != "function")) {
        reject(place, "must be {\"type\": \"function\", \"function\": {…}}");
    }
    common_json & function = tool.at("function");
    common_chat_tool out;
    if (!given(function, "name") || !function.at("name").is_string() ||
        !is_name(out.name = function.at("name").get<std::string>())) {
        reject(place + ".function.name",
               "must be 1 to " + std::to_string(tool_name_bytes_max) + " letters, digits, or one of _-.:/");
    }
    if (given(function, "description")) {
        if (!function.at("description").is_string()) {
            reject(place + ".function.description", "must be a string");
        }
        out.description = function.at("description").get<std::string>();
    }
    common_json parameters = given(function, "parameters") ? function.at("parameters") : common_json::object();
    const std::string name = place + ".function.parameters";
    if (!parameters.is_object() || (given(parameters, "type") && parameters.at("type") != "object")) {
        reject(name, "must be a schema of an object");
    }
    const bool is_strict = read_bool(function, "strict", /* otherwise */ false);
    const std::vector<std::string> lost = prepare_schema(
        parameters, {name, is_strict ? schema_strictness::complete : schema_strictness::lenient, budget});
    unenforced.insert(unenforced.end(), lost.begin(), lost.end());
    out.parameters = parameters.dump();
    return out;
}

void read_tools(common_json & request, chat_request & out) {
    if (!given(request, "tools")) {
        return;
    }
    common_json & tools = request.at("tools");
    if (!tools.is_array()) {
        reject("tools", "must be a list");
    }
    if (tools.size() > n_tools_max || tools.dump_safe().size() > tools_bytes_max) {
        reject("tools", "must be at most " + std::to_string(n_tools_max) + ", and 1 MiB of text");
    }
    std::set<std::string> names;
    schema_budget budget;
    for (size_t i = 0; i < tools.size(); ++i) {
        out.inputs.tools.push_back(read_tool(tools.at(i), indexed("tools", i), budget, out.unenforced));
        if (!names.insert(out.inputs.tools.back().name).second) {
            reject(indexed("tools", i) + ".function.name", "is that of another tool, too");
        }
    }
}

void read_tool_choice(const common_json & request, common_chat_templates_inputs & inputs) {
    const std::string choice = !given(request, "tool_choice")          ? "auto"
                               : request.at("tool_choice").is_string() ? request.at("tool_choice").get<std::string>()
                                                                       : "";
    if (choice != "auto" && choice != "none" && choice != "required") {
        reject("tool_choice", "must be auto, none or required");
    }
    if (choice == "required" && inputs.tools.empty()) {
        reject("tool_choice", "must not be required without tools");
    }
    inputs.tool_choice = common_chat_tool_choice_parse_oaicompat(choice);
}

void read_schema(common_json & request, chat_request & out) {
    if (!given(request, "json_schema")) {
        return;
    }
    common_json & schema = request.at("json_schema");
    if (out.inputs.tool_choice == COMMON_CHAT_TOOL_CHOICE_REQUIRED) {
        reject("json_schema", "cannot apply where tool_choice demands a call");
    }
    if (schema.dump_safe().size() > schema_bytes_max) {
        throw failure(S2MOE_ERROR_GRAMMAR, "json_schema is longer than " + std::to_string(schema_bytes_max) + " bytes");
    }
    schema_budget budget;
    const std::vector<std::string> lost = prepare_schema(schema, {"json_schema", schema_strictness::decisive, budget});
    out.unenforced.insert(out.unenforced.end(), lost.begin(), lost.end());
    if (schema.empty()) {
        schema.set({"$comment", "any JSON"}); // an empty schema means "none" there
    }
    out.inputs.json_schema = schema.dump();
}

// Variables of the template.

void read_variables(const common_json & request, common_chat_templates_inputs & inputs) {
    inputs.enable_thinking = read_bool(request, "enable_thinking", true);
    if (given(request, "enable_thinking")) {
        // some templates call it so
        inputs.chat_template_kwargs["thinking"] = inputs.enable_thinking ? "true" : "false";
    }
    if (!given(request, "chat_template_kwargs")) {
        return;
    }
    const common_json & variables = request.at("chat_template_kwargs");
    if (!variables.is_object()) {
        reject("chat_template_kwargs", "must be an object");
    }
    constexpr std::array taken = {"messages", "tools", "bos_token", "eos_token", "add_generation_prompt"};
    for (const auto & entry : variables.items()) {
        const std::string key = entry.key();
        if (std::find(taken.begin(), taken.end(), key) != taken.end()) {
            reject("chat_template_kwargs." + key, "is set by the server");
        }
        inputs.chat_template_kwargs[key] = entry.value().dump_safe();
    }
    inputs.enable_thinking = read_bool(variables, "enable_thinking", inputs.enable_thinking);
}

void read_continuation(const common_json & request, common_chat_templates_inputs & inputs) {
    if (!read_bool(request, "continue_final_message", false)) {
        return;
    }
    const common_chat_msg & last = inputs.messages.back();
    if (last.role != "assistant") {
        reject("continue_final_message", "needs a last message of the assistant");
    }
    if (!last.tool_calls.empty()) {
        reject("continue_final_message", "cannot continue a message with tool calls");
    }
    inputs.continue_final_message = COMMON_CHAT_CONTINUATION_AUTO;
}

} // namespace

int json_depth(const std::string & text) {
    int depth = 0;
    int deepest = 0;
    bool in_string = false;
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (in_string) {
            i += c == '\\';
            in_string = c != '"';
        } else if (c == '"') {
            in_string = true;
        } else if (c == '{' || c == '[') {
            deepest = std::max(deepest, ++depth);
        } else if (c == '}' || c == ']') {
            --depth;
        }
    }
    return deepest;
}

chat_request read_chat_request(const std::string & request_json) {
    if (json_depth(request_json) > depth_max) {
        reject("the request", "is nested deeper than " + std::to_string(depth_max));
    }
    chat_request out;
    try {
        common_json request = common_json::parse(request_json);
        if (!request.is_object()) {
            reject("the request", "must be an object");
        }
        common_chat_templates_inputs & inputs = out.inputs;
        inputs.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK;
        inputs.messages = read_messages(request);
        inputs.add_generation_prompt = read_bool(request, "add_generation_prompt", true);
        inputs.parallel_tool_calls = read_bool(request, "parallel_tool_calls", false);
        read_tools(request, out);
        read_tool_choice(request, inputs);
        read_schema(request, out);
        read_variables(request, inputs);
        read_continuation(request, inputs);
    } catch (const failure &) {
        throw;
    } catch (const std::bad_alloc &) {
        throw;
    } catch (const std::exception & e) {
        throw failure(S2MOE_ERROR_INVALID, std::string(e.what()).substr(0, 300));
    }
    return out;
}

} // namespace s2moe

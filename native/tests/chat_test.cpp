// Chat templates and the parsing of answers, with templates written here.

#include <cstring>
#include <string>

#include "check.h"

namespace {

const char * chatml = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
                      "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

const char * thinking =
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% if m['reasoning_content'] %}{{ '<think>\\n' + m['reasoning_content'] + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\\n' }}{% else %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + "
    "'<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}";

std::string apply(const test_model & m, const char * source, const char * request, int32_t expected = S2MOE_OK) {
    s2moe_chat * chat = s2moe_chat_create(m.model.get(), source);
    CHECK(chat != nullptr);
    char * result = nullptr;
    const int32_t status = s2moe_chat_apply(chat, request, &result);
    CHECK(status == expected);
    const std::string text = result == nullptr ? "" : result;
    s2moe_string_free(result);
    s2moe_chat_free(chat);
    return text;
}

// All text of one channel after feeding `text` in pieces of n_bytes.
std::string parsed(const std::string & chat_json, const std::string & text, size_t n_bytes, const char * channel) {
    s2moe_answer * answer = s2moe_answer_create(chat_json.c_str());
    CHECK(answer != nullptr);
    std::string all;
    for (size_t begin = 0; begin <= text.size(); begin += n_bytes) {
        const std::string piece = text.substr(begin, n_bytes);
        char * delta = nullptr;
        CHECK(s2moe_answer_feed(answer, piece.data(), piece.size(), begin + n_bytes > text.size(), &delta) == S2MOE_OK);
        const std::string json = delta;
        const std::string key = std::string("\"") + channel + "\":\"";
        const size_t found = json.find(key);
        const size_t start = found + key.size();
        all += found == std::string::npos ? "" : json.substr(start, json.find('"', start) - start);
        s2moe_string_free(delta);
    }
    s2moe_answer_free(answer);
    return all;
}

void test_apply(const test_model & m) {
    const char * request = R"({"messages": [{"role": "user", "content": "hi"}]})";
    const std::string result = apply(m, chatml, request);
    CHECK(result.find(R"("prompt":"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")") != std::string::npos);
    CHECK(result.find(R"("format":"content-only")") != std::string::npos);
    apply(m, chatml, "{", S2MOE_ERROR_INVALID);
    apply(m, chatml, "{}", S2MOE_ERROR_INVALID);
    apply(m, chatml, R"({"messages": []})", S2MOE_ERROR_INVALID);
    apply(m, chatml, R"({"messages": [{"content": "no role"}]})", S2MOE_ERROR_INVALID);
    apply(m, "{{ raise_exception('roles must alternate') }}", request, S2MOE_ERROR_TEMPLATE);
    CHECK(std::strstr(s2moe_last_error(), "roles must alternate") != nullptr);
    CHECK(s2moe_chat_create(m.model.get(), "{% for %}") == nullptr);
}

void test_templates_reach_nothing(const test_model & m) {
    const char * request = R"({"messages": [{"role": "user", "content": "hi"}]})";
    for (const char * source : {"{{ ''.__class__.__mro__ }}",
                                "{% include '/etc/passwd' %}",
                                "{{ self.__init__ }}",
                                "{{ cycler.__init__.__globals__ }}"}) {
        s2moe_chat * chat = s2moe_chat_create(m.model.get(), source);
        char * result = nullptr;
        if (chat != nullptr && s2moe_chat_apply(chat, request, &result) == S2MOE_OK) {
            CHECK(std::strstr(result, "root:") == nullptr && std::strstr(result, "object") == nullptr);
        }
        s2moe_string_free(result);
        s2moe_chat_free(chat);
    }
}

void test_reasoning_is_split_off(const test_model & m) {
    const std::string chat = apply(m, thinking, R"({"messages": [{"role": "user", "content": "hi"}]})");
    CHECK(chat.find(R"("format":"content-only")") == std::string::npos);
    const std::string text = "<think>\nlet me see</think>\n\nParis.";
    for (const size_t n_bytes : {1, 2, 3, 5, 8, 13, 100}) {
        CHECK(parsed(chat, text, n_bytes, "content") == "Paris.");
        CHECK(parsed(chat, text, n_bytes, "reasoning") == "let me see");
        CHECK(parsed(chat, "plain", n_bytes, "content") == "plain");
        CHECK(parsed(chat, "<think>\ncut of", n_bytes, "reasoning") == "cut of");
    }
}

const char * const tools_request =
    R"({"messages": [{"role": "user", "content": "hi"}], "parallel_tool_calls": true, "tools": [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
            "a": {"type": "integer"}, "b": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "string", "pattern": "\\d+"}}}}},
        {"type": "function", "function": {"name": "now"}}], "json_schema": )";

void test_tools(const test_model & m) {
    const std::string chat = apply(m, thinking, (std::string(tools_request) + "null}").c_str());
    CHECK(chat.find(R"("grammar_lazy":true)") != std::string::npos);
    const std::string text = "<think>\nso</think>\n\nOk. <tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}"
                             "</tool_call>\n<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
    for (const size_t n_bytes : {1, 2, 3, 7, 1000}) {
        CHECK(parsed(chat, text, n_bytes, "content") == "Ok. ");
        CHECK(parsed(chat, text, n_bytes, "reasoning") == "so");
        CHECK(parsed(chat, text, n_bytes, "name") == "addnow" || n_bytes == 1000);
        CHECK(parsed(chat, "Ok. <tool_call>nonsense", n_bytes, "content") == "Ok. ");
    }
    apply(m, thinking, (std::string(tools_request) + R"({"type": "object"}})").c_str());
    apply(m, thinking, (std::string(tools_request) + R"({"$ref": "#/no"}})").c_str(), S2MOE_ERROR_GRAMMAR);
}

} // namespace

int main() {
    const test_model m;
    test_apply(m);
    test_templates_reach_nothing(m);
    test_reasoning_is_split_off(m);
    test_tools(m);
    return 0;
}

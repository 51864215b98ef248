#include "grammar.h"

#include <cctype>
#include <memory>
#include <string>

#include "error.h"
#include "grammar_fault.h"
#include "llama-grammar.h"
#include "llama.h"
#include "terminals.h"

namespace s2moe {
namespace {

constexpr size_t grammar_bytes_max = 64 * 1024;
constexpr size_t generated_bytes_max = 2 * 1024 * 1024; // of tools and schemas, which have bounds of their own
constexpr int grammar_depth_max = 200;

using grammar_ptr = std::unique_ptr<llama_grammar, decltype(&llama_grammar_free_impl)>;

[[noreturn]] void reject(const std::string & key) {
    throw failure(S2MOE_ERROR_INVALID, key + " must be what s2moe_chat_apply() returned");
}

bool begins_blank(const std::string & text) {
    return !text.empty() && std::isspace(static_cast<unsigned char>(text[0])) != 0;
}

// What the prompt already holds of the answer, as tokens.
std::vector<llama_token> prefill_of(const llama_vocab * vocab, const std::string & generation_prompt) {
    std::vector<llama_token> tokens = common_tokenize(vocab, generation_prompt, false, true);
    const bool added_space = !tokens.empty() && !begins_blank(generation_prompt) &&
                             begins_blank(common_token_to_piece(vocab, tokens[0], true));
    if (added_space) {
        tokens.erase(tokens.begin());
    }
    return tokens;
}

// llama.cpp parses groups by recursion and expands repetitions, so both must be bounded before it sees them.
void check_bounds(const std::string & grammar, size_t bytes_max) {
    if (grammar.size() > bytes_max) {
        throw failure(S2MOE_ERROR_GRAMMAR, "the grammar is longer than " + std::to_string(bytes_max) + " bytes");
    }
    if (const size_t at = grammar.find('\0'); at != std::string::npos) {
        throw failure(S2MOE_ERROR_GRAMMAR, place_in(grammar, at) + ": the grammar contains a NUL character");
    }
    int depth = 0;
    for (size_t at = 0; at < grammar.size(); ++at) {
        depth += grammar[at] == '(' ? 1 : grammar[at] == ')' ? -1 : 0;
        if (depth > grammar_depth_max) {
            throw failure(S2MOE_ERROR_GRAMMAR,
                          place_in(grammar, at) + ": the grammar nests more than " + std::to_string(grammar_depth_max) +
                              " groups");
        }
    }
}

// common_sampler_init() would leak its chain over a grammar that does not parse.
grammar_ptr parse(const llama_vocab * vocab, const std::string & grammar) {
    grammar_ptr parsed(llama_grammar_init_impl(vocab, grammar.c_str(), "root", false, nullptr, 0, nullptr, 0),
                       llama_grammar_free_impl);
    if (parsed == nullptr) {
        throw failure(S2MOE_ERROR_GRAMMAR, "the grammar cannot be used: " + find_grammar_fault(vocab, grammar).text());
    }
    if (parsed->stacks.empty()) {
        throw failure(S2MOE_ERROR_GRAMMAR, "the grammar allows no text: the rule `root` leads to nothing but itself");
    }
    return parsed;
}

void check_terminals(const llama_vocab * vocab, const std::string & grammar) {
    if (const auto fault = find_terminal_fault(vocab, grammar)) {
        throw failure(S2MOE_ERROR_GRAMMAR, "the grammar cannot be used: " + fault->text());
    }
}

// It would also leak over one that refuses what the prompt holds.
void check_prefill(const llama_vocab * vocab, llama_grammar & grammar, const std::string & generation_prompt) {
    try {
        for (const llama_token token : prefill_of(vocab, generation_prompt)) {
            llama_grammar_accept_impl(grammar, token);
        }
    } catch (const llama_grammar_too_ambiguous &) {
        throw;
    } catch (const llama_grammar_aborted &) {
        throw;
    } catch (const std::exception &) {
        throw failure(S2MOE_ERROR_GRAMMAR, "the message to continue is not the beginning of what the answer must be");
    }
}

void read_triggers(const llama_vocab * vocab, const common_json & params, common_params_sampling & out) {
    for (const common_json & trigger : params.value("grammar_triggers", common_json::array())) {
        common_grammar_trigger t;
        const int type = trigger.at("type").get<int>();
        t.value = trigger.at("value").get<std::string>();
        t.token = static_cast<llama_token>(trigger.value("token", int64_t{LLAMA_TOKEN_NULL}));
        const bool has_token = t.token >= 0 && t.token < llama_vocab_n_tokens(vocab);
        if (type < COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN || type > COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL ||
            (type == COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN && !has_token)) {
            reject("grammar_triggers");
        }
        t.type = static_cast<common_grammar_trigger_type>(type);
        out.grammar_triggers.push_back(t);
    }
    if (out.grammar_lazy && out.grammar_triggers.empty()) {
        reject("grammar_triggers");
    }
    for (const common_json & preserved : params.value("preserved_tokens", common_json::array())) {
        const auto ids = common_tokenize(vocab, preserved.get<std::string>(), false, true);
        if (ids.size() == 1) {
            out.preserved_tokens.insert(ids[0]);
        }
    }
}

// A lazy grammar must not take a trigger inside reasoning for one; llama.cpp's reasoning budget knows where that ends.
void read_thinking(const llama_vocab * vocab, const common_json & thinking, common_params_sampling & out) {
    out.reasoning_budget_start = common_tokenize(vocab, thinking.at("start").get<std::string>(), false, true);
    for (const common_json & end : thinking.at("ends")) {
        out.reasoning_budget_end.push_back(common_tokenize(vocab, end.get<std::string>(), false, true));
    }
}

} // namespace

void read_grammar(const llama_vocab * vocab, const common_json & params, common_params_sampling & out) {
    const auto given = [&](const char * key) { return params.contains(key) && !params.at(key).is_null(); };
    if (!given("grammar")) {
        return;
    }
    if (!params.at("grammar").is_string()) {
        throw failure(S2MOE_ERROR_INVALID, "grammar must be a string");
    }
    const std::string grammar = params.at("grammar").get<std::string>();
    if (grammar.empty()) {
        return;
    }
    const bool is_generated = given("preserved_tokens");
    check_bounds(grammar, is_generated ? generated_bytes_max : grammar_bytes_max);
    // such a grammar begins with what the prompt already holds of the answer
    const bool is_prefilled = given("generation_prompt");
    const grammar_ptr parsed = parse(vocab, grammar);
    if (!is_generated) {
        check_terminals(vocab, grammar);
    }
    out.grammar = common_grammar(is_prefilled ? COMMON_GRAMMAR_TYPE_TOOL_CALLS : COMMON_GRAMMAR_TYPE_USER, grammar);
    out.grammar_lazy = params.value("grammar_lazy", false);
    if (is_prefilled) {
        out.generation_prompt = params.at("generation_prompt").get<std::string>();
        if (!out.grammar_lazy) {
            check_prefill(vocab, *parsed, out.generation_prompt);
        }
    }
    read_triggers(vocab, params, out);
    if (out.grammar_lazy && given("thinking")) {
        read_thinking(vocab, params.at("thinking"), out);
    }
}

} // namespace s2moe

#include <cmath>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "common.h"
#include "error.h"
#include "json.h"
#include "llama.h"
#include "s2moe.h"
#include "sampling.h"

using s2moe::fail;
using s2moe::failure;

struct s2moe_sampler {
    common_sampler_ptr impl;
    int32_t n_vocab = 0;
};

namespace {

[[noreturn]] void reject(const char * key, const std::string & allowed) {
    throw failure(S2MOE_ERROR_INVALID, std::string(key) + " must be " + allowed);
}

std::optional<double> number(const common_json & params, const char * key) {
    if (!params.contains(key) || params.at(key).is_null()) {
        return std::nullopt;
    }
    if (!params.at(key).is_number()) {
        reject(key, "a number");
    }
    const auto value = params.at(key).get<double>();
    if (!std::isfinite(value)) {
        reject(key, "finite");
    }
    return value;
}

std::optional<double> recommended(const llama_model * model, llama_model_meta_key key) {
    char text[64] = {};
    if (llama_model_meta_val_str(model, llama_model_meta_key_str(key), text, sizeof(text)) <= 0) {
        return std::nullopt;
    }
    char * end = nullptr;
    const double value = std::strtod(text, &end);
    return end != text && std::isfinite(value) ? std::optional(value) : std::nullopt;
}

struct field {
    const char * key;
    double minimum;
    double maximum;
    const char * allowed;
    std::optional<llama_model_meta_key> meta;
};

// The request's value, checked; else the model's recommendation, if it lies in the domain; else `fallback`.
template <typename T> T choose(const llama_model * model, const common_json & params, const field & f, T fallback) {
    if (const auto value = number(params, f.key)) {
        if (*value < f.minimum || *value > f.maximum) {
            reject(f.key, f.allowed);
        }
        if (std::is_integral_v<T> && *value != std::floor(*value)) {
            reject(f.key, "a whole number");
        }
        return static_cast<T>(*value);
    }
    if (f.meta) {
        const auto value = recommended(model, *f.meta);
        if (value && *value >= f.minimum && *value <= f.maximum) {
            return static_cast<T>(*value);
        }
    }
    return fallback;
}

std::string text(const common_json & params, const char * key) {
    if (!params.contains(key) || params.at(key).is_null()) {
        return "";
    }
    if (!params.at(key).is_string()) {
        reject(key, "a string");
    }
    return params.at(key).get<std::string>();
}

void read_logit_bias(const llama_vocab * vocab, const common_json & params, common_params_sampling & out) {
    if (!params.contains("logit_bias") || params.at("logit_bias").is_null()) {
        return;
    }
    const common_json & pairs = params.at("logit_bias");
    if (!pairs.is_array()) {
        reject("logit_bias", "an array of [token, bias]");
    }
    for (const common_json & pair : pairs) {
        if (!pair.is_array() || pair.size() != 2 || !pair.at(size_t{0}).is_number_integer() ||
            !pair.at(1).is_number()) {
            reject("logit_bias", "an array of [token, bias]");
        }
        const auto token = pair.at(size_t{0}).get<int64_t>();
        const auto bias = pair.at(1).get<double>();
        if (token < 0 || token >= llama_vocab_n_tokens(vocab)) {
            reject("logit_bias",
                   "about tokens of the vocabulary, 0 to " + std::to_string(llama_vocab_n_tokens(vocab) - 1));
        }
        out.logit_bias.push_back({static_cast<llama_token>(token), static_cast<float>(bias)});
    }
}

constexpr size_t grammar_bytes_max = 64 * 1024;
constexpr int grammar_depth_max = 200;

// llama.cpp parses groups by recursion and expands repetitions, so both must be bounded before it sees them.
void check_grammar(const llama_vocab * vocab, const std::string & grammar) {
    if (grammar.size() > grammar_bytes_max) {
        throw failure(S2MOE_ERROR_GRAMMAR,
                      "the grammar is longer than " + std::to_string(grammar_bytes_max) + " bytes");
    }
    if (grammar.find('\0') != std::string::npos) {
        throw failure(S2MOE_ERROR_GRAMMAR, "the grammar contains a NUL character");
    }
    int depth = 0;
    for (const char c : grammar) {
        depth += c == '(' ? 1 : c == ')' ? -1 : 0;
        if (depth > grammar_depth_max) {
            throw failure(S2MOE_ERROR_GRAMMAR,
                          "the grammar nests more than " + std::to_string(grammar_depth_max) + " groups");
        }
    }
    // common_sampler_init() would leak its chain over a grammar that does not parse
    llama_sampler * parsed = nullptr;
    try {
        parsed = llama_sampler_init_grammar(vocab, grammar.c_str(), "root");
    } catch (const std::exception & e) {
        throw failure(S2MOE_ERROR_GRAMMAR, e.what());
    }
    if (parsed == nullptr) {
        throw failure(S2MOE_ERROR_GRAMMAR, "the grammar does not parse, or has no rule `root`");
    }
    llama_sampler_free(parsed);
}

void read_grammar(const llama_vocab * vocab, const common_json & params, common_params_sampling & out) {
    const std::string grammar = text(params, "grammar");
    if (grammar.empty()) {
        return;
    }
    check_grammar(vocab, grammar);
    out.grammar = common_grammar(COMMON_GRAMMAR_TYPE_USER, grammar);
    out.grammar_lazy = params.value("grammar_lazy", false);
    out.generation_prompt = text(params, "generation_prompt");
    for (const common_json & trigger : params.value("grammar_triggers", common_json::array())) {
        common_grammar_trigger t;
        t.type = static_cast<common_grammar_trigger_type>(trigger.at("type").get<int>());
        t.value = trigger.at("value").get<std::string>();
        t.token = static_cast<llama_token>(trigger.value("token", int64_t{LLAMA_TOKEN_NULL}));
        out.grammar_triggers.push_back(t);
    }
    for (const common_json & preserved : params.value("preserved_tokens", common_json::array())) {
        const auto ids = common_tokenize(vocab, preserved.get<std::string>(), false, true);
        if (ids.size() == 1) {
            out.preserved_tokens.insert(ids[0]);
        }
    }
}

common_params_sampling read_params(const llama_model * model, const common_json & params) {
    if (!params.is_object()) {
        throw failure(S2MOE_ERROR_INVALID, "sampling parameters must be a JSON object");
    }
    constexpr double big = 1e6;
    constexpr double tokens_max = 2147483647.0;
    const llama_vocab * vocab = llama_model_get_vocab(model);
    common_params_sampling out;
    out.temp = choose(
        model, params, {"temperature", 0, 100, "between 0 and 100", LLAMA_MODEL_META_KEY_SAMPLING_TEMP}, out.temp);
    out.top_p =
        choose(model, params, {"top_p", 0, 1, "between 0 and 1", LLAMA_MODEL_META_KEY_SAMPLING_TOP_P}, out.top_p);
    out.top_k =
        choose(model, params, {"top_k", 0, tokens_max, "at least 0", LLAMA_MODEL_META_KEY_SAMPLING_TOP_K}, out.top_k);
    out.min_p =
        choose(model, params, {"min_p", 0, 1, "between 0 and 1", LLAMA_MODEL_META_KEY_SAMPLING_MIN_P}, out.min_p);
    out.penalty_repeat =
        choose(model,
               params,
               {"repeat_penalty", 1e-3, 1e3, "between 0.001 and 1000", LLAMA_MODEL_META_KEY_SAMPLING_PENALTY_REPEAT},
               out.penalty_repeat);
    out.penalty_present =
        choose(model, params, {"presence_penalty", -big, big, "finite", std::nullopt}, out.penalty_present);
    out.penalty_freq =
        choose(model, params, {"frequency_penalty", -big, big, "finite", std::nullopt}, out.penalty_freq);
    out.penalty_last_n =
        choose(model,
               params,
               {"repeat_last_n", 0, 1 << 20, "between 0 and 1048576", LLAMA_MODEL_META_KEY_SAMPLING_PENALTY_LAST_N},
               out.penalty_last_n);
    out.seed =
        choose(model, params, {"seed", 0, 4294967295.0, "between 0 and 4294967295", std::nullopt}, LLAMA_DEFAULT_SEED);
    if (number(params, "seed") && out.seed == LLAMA_DEFAULT_SEED) {
        out.seed = LLAMA_DEFAULT_SEED - 1; // llama.cpp takes that value for "random"
    }
    out.n_prev = std::max(out.n_prev, out.penalty_last_n);
    out.no_perf = true;
    read_logit_bias(vocab, params, out);
    read_grammar(vocab, params, out);
    return out;
}

} // namespace

s2moe_sampler * s2moe_sampler_create(const llama_model * model, const char * params_json, int32_t * last_status) {
    std::unique_ptr<s2moe_sampler> sampler;
    const int32_t status = s2moe::guard(S2MOE_ERROR_INVALID, [&] {
        common_params_sampling params = read_params(model, common_json::parse(params_json));
        const bool has_grammar = !common_grammar_value(params.grammar).empty();
        auto made = std::make_unique<s2moe_sampler>();
        made->n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        try {
            made->impl.reset(common_sampler_init(model, params));
        } catch (const std::exception & e) {
            throw failure(has_grammar ? S2MOE_ERROR_GRAMMAR : S2MOE_ERROR_INVALID, e.what());
        }
        sampler = std::move(made);
    });
    if (last_status != nullptr) {
        *last_status = status;
    }
    return sampler.release();
}

void s2moe_sampler_free(s2moe_sampler * sampler) {
    delete sampler;
}

int32_t s2moe_sampler_sample(s2moe_sampler * sampler, llama_context * ctx, int32_t index, int32_t * token) {
    return s2moe::guard(S2MOE_ERROR_INTERNAL, [&] {
        if (llama_get_logits_ith(ctx, index) == nullptr) {
            throw failure(S2MOE_ERROR_INVALID, "no logits at index " + std::to_string(index));
        }
        const llama_token chosen = common_sampler_sample(sampler->impl.get(), ctx, index);
        common_sampler_accept(sampler->impl.get(), chosen, true);
        *token = chosen;
    });
}

int32_t s2moe_sampler_accept_prompt(s2moe_sampler * sampler, const int32_t * tokens, int32_t n_tokens) {
    return s2moe::guard(S2MOE_ERROR_INTERNAL, [&] {
        for (int32_t i = 0; i < n_tokens; ++i) {
            if (tokens[i] < 0 || tokens[i] >= sampler->n_vocab) {
                throw failure(S2MOE_ERROR_INVALID, "token " + std::to_string(tokens[i]) + " is not in the vocabulary");
            }
            common_sampler_accept(sampler->impl.get(), tokens[i], false);
        }
    });
}

uint32_t s2moe_sampler_seed(const s2moe_sampler * sampler) {
    return common_sampler_get_seed(sampler->impl.get());
}

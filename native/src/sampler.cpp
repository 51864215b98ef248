#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "abort.h"
#include "common.h"
#include "error.h"
#include "json.h"
#include "llama-grammar.h"
#include "llama.h"
#include "s2moe.h"
#include "sampling.h"
#include "sampling/grammar.h"
#include "sampling/thinking.h"

using s2moe::failure;

struct s2moe_sampler {
    common_sampler_ptr impl;
    common_sampler_ptr free; // the same without the grammar; only where there is a gate
    std::optional<s2moe::thinking_gate> gate;
    const llama_vocab * vocab = nullptr;
    s2moe_abort * abort = nullptr;
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
    s2moe::read_grammar(vocab, params, out);
    return out;
}

// Runs what makes or follows a grammar.
void at_grammar(s2moe_abort * abort, const std::function<void()> & body) {
    const s2moe::grammar_abort scope(abort);
    try {
        body();
    } catch (const llama_grammar_too_ambiguous & e) {
        throw failure(S2MOE_ERROR_GRAMMAR, e.what());
    } catch (const llama_grammar_aborted & e) {
        throw failure(S2MOE_ERROR_ABORTED, e.what());
    }
}

common_sampler_ptr create(const llama_model * model, common_params_sampling & params) {
    try {
        return common_sampler_ptr(common_sampler_init(model, params));
    } catch (const std::exception & e) {
        throw failure(params.grammar.empty() ? S2MOE_ERROR_INVALID : S2MOE_ERROR_GRAMMAR, e.what());
    }
}

// A grammar may ask for what no token of the vocabulary begins. llama.cpp then chooses any token, and ends the process
// over it when it is accepted.
llama_token choose_token(common_sampler * sampler, llama_context * ctx, int32_t index) {
    const llama_token chosen = common_sampler_sample(sampler, ctx, index);
    const llama_token_data_array * candidates = common_sampler_get_candidates(sampler, /* do_sort */ false);
    if (candidates->selected < 0 || candidates->data[candidates->selected].logit == -INFINITY) {
        throw failure(S2MOE_ERROR_INTERNAL, "no token of the vocabulary may follow");
    }
    return chosen;
}

// The next token if it belongs to reasoning, which the grammar does not concern; else nothing.
std::optional<llama_token> choose_reasoning(s2moe_sampler & sampler, llama_context * ctx, int32_t index) {
    const llama_token chosen = choose_token(sampler.free.get(), ctx, index);
    const std::string piece = common_token_to_piece(sampler.vocab, chosen, true);
    if (!sampler.gate->admits(piece, llama_vocab_is_eog(sampler.vocab, chosen))) {
        return std::nullopt;
    }
    sampler.gate->follow(piece);
    common_sampler_accept(sampler.free.get(), chosen, true);
    common_sampler_accept(sampler.impl.get(), chosen, false);
    return chosen;
}

llama_token next_token(s2moe_sampler & sampler, llama_context * ctx, int32_t index) {
    if (sampler.gate && sampler.gate->is_open()) {
        if (const auto chosen = choose_reasoning(sampler, ctx, index)) {
            return *chosen;
        }
    }
    const llama_token chosen = choose_token(sampler.impl.get(), ctx, index);
    common_sampler_accept(sampler.impl.get(), chosen, true);
    return chosen;
}

} // namespace

s2moe_sampler *
s2moe_sampler_create(const llama_model * model, const char * params_json, s2moe_abort * abort, int32_t * last_status) {
    std::unique_ptr<s2moe_sampler> sampler;
    const int32_t status = s2moe::guard(S2MOE_ERROR_INVALID, [&] {
        const common_json json = common_json::parse(params_json);
        auto made = std::make_unique<s2moe_sampler>();
        made->vocab = llama_model_get_vocab(model);
        made->abort = abort;
        common_params_sampling params;
        at_grammar(abort, [&] { params = read_params(model, json); });
        made->impl = create(model, params); // takes no longer, and would leak if it were aborted
        made->gate = s2moe::thinking_gate::read(json, params);
        if (made->gate) {
            params.grammar = {};
            params.seed = common_sampler_get_seed(made->impl.get());
            made->free = create(model, params);
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
        at_grammar(sampler->abort, [&] { *token = next_token(*sampler, ctx, index); });
    });
}

int32_t s2moe_sampler_accept_prompt(s2moe_sampler * sampler, const int32_t * tokens, int32_t n_tokens) {
    return s2moe::guard(S2MOE_ERROR_INTERNAL, [&] {
        for (int32_t i = 0; i < n_tokens; ++i) {
            if (tokens[i] < 0 || tokens[i] >= llama_vocab_n_tokens(sampler->vocab)) {
                throw failure(S2MOE_ERROR_INVALID, "token " + std::to_string(tokens[i]) + " is not in the vocabulary");
            }
            common_sampler_accept(sampler->impl.get(), tokens[i], false);
            if (sampler->free) {
                common_sampler_accept(sampler->free.get(), tokens[i], false);
            }
        }
    });
}

uint32_t s2moe_sampler_seed(const s2moe_sampler * sampler) {
    return common_sampler_get_seed(sampler->impl.get());
}

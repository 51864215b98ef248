#include "options.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string_view>

#include "error.h"
#include "json.h"

namespace s2moe {

namespace {

struct preset {
    const char * name;
    double budget;
    bool single_token_bias;
};

// The budgets were chosen by agreement with the exact target on the demo model (docs/speculation.md).
constexpr std::array presets = {preset{"exact", 0, false}, preset{"balanced", 0.05, true}, preset{"fast", 0.20, true}};

constexpr std::array methods = {
    draft_method::off, draft_method::s2moe, draft_method::expert_skip, draft_method::cascade};

constexpr std::array<std::string_view, 15> keys = {"method",
                                                   "preset",
                                                   "exact",
                                                   "error_budget",
                                                   "reuse_strength",
                                                   "residency_weight",
                                                   "single_token_bias",
                                                   "reuse_cap",
                                                   "draft_experts",
                                                   "max_nodes",
                                                   "adaptive",
                                                   "reuse_gating",
                                                   "shared_context",
                                                   "prefetch",
                                                   "samples"};

[[noreturn]] void reject(const char * key, const std::string & allowed) {
    throw failure(S2MOE_ERROR_INVALID, std::string(key) + " must be " + allowed);
}

// The tree of expert-skip has two chains.
int most_nodes(draft_method method) {
    return (method == draft_method::expert_skip ? 2 : 1) * (S2MOE_N_VERIFY_ROWS - 1);
}

// Reads the keys of one object.
class reader {
  public:
    explicit reader(const common_json & object) : object(object) {
    }

    bool has(const char * key) const {
        return object.contains(key) && !object.at(key).is_null();
    }
    std::string text(const char * key, const std::string & allowed) const {
        if (!object.at(key).is_string()) {
            reject(key, allowed);
        }
        return object.at(key).get<std::string>();
    }
    bool flag(const char * key, bool otherwise) const {
        if (!has(key)) {
            return otherwise;
        }
        if (!object.at(key).is_boolean()) {
            reject(key, "true or false");
        }
        return object.at(key).get<bool>();
    }
    double number(const char * key, double least, double most, double otherwise) const {
        if (!has(key)) {
            return otherwise;
        }
        const std::string allowed = "between " + short_text(least) + " and " + short_text(most);
        if (!object.at(key).is_number()) {
            reject(key, allowed);
        }
        const auto value = object.at(key).get<double>();
        if (!(value >= least && value <= most)) {
            reject(key, allowed);
        }
        return value;
    }
    int integer(const char * key, int least, int most, int otherwise) const {
        const double value = number(key, least, most, otherwise);
        if (value != std::floor(value)) {
            reject(key, "a whole number");
        }
        return static_cast<int>(value);
    }

  private:
    static std::string short_text(double value) {
        std::string text = std::to_string(value);
        text.erase(text.find_last_not_of('0') + 1);
        return text.back() == '.' ? text.substr(0, text.size() - 1) : text;
    }

    const common_json & object;
};

} // namespace

const char * method_name(draft_method method) {
    switch (method) {
    case draft_method::s2moe:
        return "s2moe";
    case draft_method::expert_skip:
        return "expert-skip";
    case draft_method::cascade:
        return "cascade";
    default:
        return "off";
    }
}

speculation_options read_options(const char * json, int k, int n_expert) {
    const common_json object = common_json::parse(json == nullptr || *json == '\0' ? "{}" : json);
    if (!object.is_object()) {
        throw failure(S2MOE_ERROR_INVALID, "the options are no JSON object");
    }
    for (const auto & [key, value] : object.items()) {
        if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
            throw failure(S2MOE_ERROR_INVALID, key + " is no option of speculation");
        }
    }
    const reader options(object);
    speculation_options result;
    if (options.has("method")) {
        const std::string allowed = "\"s2moe\", \"expert-skip\", \"cascade\" or \"off\"";
        const std::string name = options.text("method", allowed);
        const auto found =
            std::find_if(methods.begin(), methods.end(), [&](draft_method each) { return name == method_name(each); });
        if (found == methods.end()) {
            reject("method", allowed);
        }
        result.method = *found;
    }
    // the baselines verify exactly, unless they are told otherwise
    result.preset = result.method == draft_method::s2moe ? "balanced" : "exact";
    if (options.has("preset")) {
        result.preset = options.text("preset", R"("exact", "balanced" or "fast")");
    }
    if (options.flag("exact", false)) {
        result.preset = "exact";
    }
    const auto chosen =
        std::find_if(presets.begin(), presets.end(), [&](const preset & each) { return result.preset == each.name; });
    if (chosen == presets.end()) {
        reject("preset", R"("exact", "balanced" or "fast")");
    }
    gate_settings & gate = result.gate;
    gate.budget = options.number("error_budget", 0, 1, chosen->budget);
    gate.strength = options.number("reuse_strength", 0, 10, gate.strength);
    gate.residency_weight = options.number("residency_weight", 0, 10, gate.residency_weight);
    gate.single_token_bias = options.flag("single_token_bias", chosen->single_token_bias);
    gate.cap = options.integer("reuse_cap", 0, n_expert, 0);
    if (gate.cap > 0 && gate.cap < k) {
        reject("reuse_cap", "0 or at least " + std::to_string(k) + ", the experts of a token");
    }
    if (options.flag("exact", false) || !options.flag("reuse_gating", true)) {
        gate.budget = 0;
    }
    if (gate.budget == 0) {
        result.preset = "exact";
    } else if (gate.budget != chosen->budget || gate.strength != 1 || gate.residency_weight != 0.5 || gate.cap != 0 ||
               gate.single_token_bias != chosen->single_token_bias) {
        result.preset = "custom";
    }
    result.draft_experts = options.integer("draft_experts", 0, k, 0); // no more than the model's own
    if (result.draft_experts == 0) {
        result.draft_experts = std::max(1, k / 4);
    }
    result.max_nodes = options.integer("max_nodes", 1, S2MOE_N_VERIFY_ROWS - 1, most_nodes(result.method));
    result.adaptive = options.flag("adaptive", true);
    result.shared_context = options.flag("shared_context", result.method != draft_method::expert_skip);
    result.prefetch = options.flag("prefetch", result.method == draft_method::s2moe);
    result.samples = options.flag("samples", false);
    return result;
}

std::string speculation_options::regime_key() const {
    std::string key = std::string(method_name(method)) + "/" + preset + "/" + std::to_string(draft_experts) + "/" +
                      (shared_context ? "shared" : "own");
    if (method == draft_method::s2moe && !adaptive) {
        key += "/fixed"; // the shape of the tree; the other methods have but one
    }
    if (!prefetch) {
        key += "/no-prefetch";
    }
    if (max_nodes != most_nodes(method)) {
        key += "/nodes-" + std::to_string(max_nodes);
    }
    if (preset == "custom") {
        char values[96];
        std::snprintf(values,
                      sizeof(values),
                      "/budget-%.3g/%s/strength-%.3g/residency-%.3g/cap-%d",
                      gate.budget,
                      gate.single_token_bias ? "all" : "drafts",
                      gate.strength,
                      gate.residency_weight,
                      gate.cap);
        key += values;
    }
    return key;
}

} // namespace s2moe

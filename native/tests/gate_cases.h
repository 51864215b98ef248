// Random decodes for the gate's rule, and what the CPU's own code makes of them: shared by the tests of the rule's
// lanes and of the kernel.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "gate_rule.h"

struct gate_case_layer {
    int32_t kind = 0;
    std::vector<float> scores;  // [n_rows][n_stride]
    std::vector<float> weights; // likewise
    std::vector<uint8_t> residency;
};

// One decode: some layers in turn.
struct gate_case {
    s2moe::gate_control control;
    int n_rows = 0;
    int n_expert = 0;
    int n_stride = 0; // of rows, in floats
    int k = 0;
    int n_ids = 0;
    std::vector<gate_case_layer> layers;

    bool is_gated() const {
        return control.drafting || n_rows <= control.n_rows;
    }
};

struct gate_case_result {
    struct layer {
        std::vector<int32_t> exact;  // [n_rows][n_ids]
        std::vector<int32_t> chosen; // likewise
        std::vector<float> gated;    // [n_rows][n_expert]
    };
    std::vector<layer> layers;
    std::vector<s2moe::gate_account> accounts; // [n_rows]

    explicit gate_case_result(const gate_case & from) : layers(from.layers.size()), accounts(from.n_rows) {
        const auto rows = static_cast<size_t>(from.n_rows);
        for (layer & each : layers) {
            each.exact.assign(rows * from.n_ids, -1);
            each.chosen.assign(rows * from.n_ids, -1);
            each.gated.assign(rows * from.n_expert, 0);
        }
    }
};

class gate_case_maker {
  public:
    explicit gate_case_maker(uint64_t seed) : random(seed) {
    }

    // Decodes of up to so many rows, experts and experts per row.
    gate_case next(int max_rows, int max_experts, int max_k) {
        gate_case made;
        do {
            made.n_expert = one_of({4, 16, 60, 64, 128, 512});
        } while (made.n_expert > max_experts);
        made.n_stride = made.n_expert + (chance(0.3) ? below(5) : 0);
        made.k = 1 + below(std::min({chance(0.15) ? made.n_expert : 10, made.n_expert, max_k}));
        made.n_rows = 1 + below(std::min(one_of({1, 4, 4, 8, 16, 64}), max_rows));
        made.n_rows = std::clamp(600000 / (made.n_expert * made.k), 1, made.n_rows);
        s2moe::gate_control & control = made.control;
        control.budget = one_of({0.0, 0.02, 0.05, 0.1, 0.5, 1.0});
        control.strength = one_of({1.0, 1.0, 1.0, 0.5, 3.0, 0.0});
        control.residency_weight = one_of({0.5, 0.5, 0.0, 1.0});
        control.cap = chance(0.4) ? 0 : 1 + below(made.n_expert + 3);
        control.single_token_bias = chance(0.3);
        control.drafting = chance(0.15);
        control.k_draft = control.drafting ? 1 + below(std::min(made.n_expert, max_k)) : 0;
        control.n_rows = made.n_rows - (chance(0.03) ? 1 : 0);
        control.share = one_of({0.0, 0.0, 0.01, 0.2, -0.01});
        made.n_ids = std::min(std::max(made.k, control.k_draft) + below(3), made.n_expert);
        for (int b = 0; b < made.n_rows; ++b) {
            control.prefixes[b] = b == 0 || chance(0.1) ? 1 : chance(0.1) ? 0 : uniform();
        }
        if (chance(0.05)) {
            std::fill_n(control.prefixes, made.n_rows, 0);
        }
        made.layers.resize(1 + below(4));
        for (gate_case_layer & layer : made.layers) {
            fill(made, layer);
        }
        return made;
    }

  private:
    double uniform() {
        return std::uniform_real_distribution<double>()(random);
    }
    double normal() {
        return std::normal_distribution<double>()(random);
    }
    bool chance(double share) {
        return uniform() < share;
    }
    int below(int n) {
        return std::uniform_int_distribution<int>(0, n - 1)(random);
    }
    template <typename value> value one_of(std::initializer_list<value> values) {
        return values.begin()[below(static_cast<int>(values.size()))];
    }

    void fill(const gate_case & of, gate_case_layer & layer) {
        layer.kind = below(4);
        layer.residency.resize(of.n_expert);
        const double absent = uniform();
        for (uint8_t & each : layer.residency) {
            each = chance(absent) ? S2MOE_ABSENT : one_of({S2MOE_RESIDENT, S2MOE_RESIDENT, S2MOE_IN_FLIGHT});
        }
        const auto n_values = static_cast<size_t>(of.n_rows) * of.n_stride;
        layer.scores.assign(n_values, std::numeric_limits<float>::quiet_NaN()); // behind the rows, too
        layer.weights = layer.scores;
        std::vector<double> common(of.n_expert);
        std::generate(common.begin(), common.end(), [&] { return 1.5 * normal(); }); // neighbours resemble each other
        const double scale = one_of({1.0, 1.0, 0.02, 20.0});
        const bool ties = chance(0.25);
        const double score_damage = chance(0.3) ? one_of({0.02, 0.3, 0.9}) : 0;
        const double weight_damage = chance(0.15) ? one_of({0.005, 0.1}) : 0;
        for (int b = 0; b < of.n_rows; ++b) {
            fill_row(of, layer, b, [&](int e) {
                const double logit = scale * (common[e] + normal());
                return ties ? std::round(logit) : logit;
            });
            damage(of, layer.scores, b, score_damage);
            damage(of, layer.weights, b, weight_damage);
        }
    }

    template <class function> void fill_row(const gate_case & of, gate_case_layer & layer, int b, function logit) {
        std::vector<double> logits(of.n_expert);
        for (int e = 0; e < of.n_expert; ++e) {
            logits[e] = logit(e);
        }
        const double top = *std::max_element(logits.begin(), logits.end());
        double sum = 0;
        for (const double each : logits) {
            sum += std::exp(each - top);
        }
        for (int e = 0; e < of.n_expert; ++e) {
            const auto probability = static_cast<float>(std::exp(logits[e] - top) / sum);
            const auto value = static_cast<float>(logits[e]);
            const size_t at = static_cast<size_t>(b) * of.n_stride + e;
            layer.scores[at] = (layer.kind & LLAMA_MOE_SCORES_LOG) != 0 ? probability : value;
            layer.weights[at] = (layer.kind & LLAMA_MOE_WEIGHTS_EXP) != 0 ? value : probability;
        }
    }

    void damage(const gate_case & of, std::vector<float> & values, int b, double share) {
        constexpr float infinity = std::numeric_limits<float>::infinity();
        for (int e = 0; e < of.n_expert && share > 0; ++e) {
            if (chance(share)) {
                values[static_cast<size_t>(b) * of.n_stride + e] = one_of(
                    {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity, -infinity, 0.0F, -0.0F, -1.0F});
            }
        }
    }

    std::mt19937_64 random;
};

// What a draft uses: the best of those in memory, then the best of the others.
inline std::vector<int32_t> drafted(const gate_case & of, const gate_case_layer & layer, int b) {
    const float * scores = layer.scores.data() + static_cast<size_t>(b) * of.n_stride;
    std::vector<int32_t> order(of.n_expert);
    std::iota(order.begin(), order.end(), 0);
    std::erase_if(order, [&](int e) { return !(scores[e] > -INFINITY); });
    std::stable_sort(order.begin(), order.end(), [&](int x, int y) { return scores[x] > scores[y]; });
    std::stable_partition(order.begin(), order.end(), [&](int e) { return layer.residency[e] == S2MOE_RESIDENT; });
    order.resize(std::min<size_t>(order.size(), of.control.k_draft));
    return order;
}

// The case by s2moe_gate_select(), with the accounts that expert_gate keeps.
inline gate_case_result expected_of(const gate_case & of) {
    gate_case_result result(of);
    const auto n_rows = static_cast<size_t>(of.n_rows);
    const s2moe::gate_control & control = of.control;
    s2moe_gate_settings settings = {control.drafting ? 0 : control.budget,
                                    control.strength,
                                    control.residency_weight,
                                    control.cap,
                                    control.single_token_bias};
    for (size_t i = 0; i < of.layers.size(); ++i) {
        const gate_case_layer & layer = of.layers[i];
        gate_case_result::layer & out = result.layers[i];
        std::vector<float> scores;
        std::vector<float> weights;
        std::vector<double> allowances;
        for (size_t b = 0; b < n_rows; ++b) {
            const auto begin = static_cast<ptrdiff_t>(b * of.n_stride);
            scores.insert(scores.end(), layer.scores.begin() + begin, layer.scores.begin() + begin + of.n_expert);
            weights.insert(weights.end(), layer.weights.begin() + begin, layer.weights.begin() + begin + of.n_expert);
            const s2moe::gate_account & spent = result.accounts[b];
            allowances.push_back(control.budget * (spent.n_layers + 1) + control.share - spent.displaced);
        }
        out.gated = scores;
        if (!of.is_gated()) {
            continue;
        }
        std::vector<int32_t> exact(n_rows * of.k);
        std::vector<int32_t> chosen(n_rows * of.k);
        std::vector<double> displaced(n_rows);
        CHECK(s2moe_gate_select(&settings,
                                of.n_rows,
                                of.n_expert,
                                of.k,
                                layer.kind,
                                scores.data(),
                                weights.data(),
                                layer.residency.data(),
                                control.prefixes,
                                allowances.data(),
                                exact.data(),
                                chosen.data(),
                                displaced.data()) == S2MOE_OK);
        for (size_t b = 0; b < n_rows; ++b) {
            std::vector<int32_t> used(chosen.begin() + static_cast<ptrdiff_t>(b * of.k),
                                      chosen.begin() + static_cast<ptrdiff_t>((b + 1) * of.k));
            if (control.drafting) {
                used = drafted(of, layer, static_cast<int>(b));
            } else {
                result.accounts[b].n_layers += 1;
                result.accounts[b].displaced += displaced[b];
                result.accounts[b].n_biased += displaced[b] > 0;
            }
            std::copy_n(exact.begin() + static_cast<ptrdiff_t>(b * of.k),
                        of.k,
                        out.exact.begin() + static_cast<ptrdiff_t>(b * of.n_ids));
            std::copy(used.begin(), used.end(), out.chosen.begin() + static_cast<ptrdiff_t>(b * of.n_ids));
            for (int e = 0; e < of.n_expert && (control.drafting || displaced[b] > 0); ++e) {
                if (std::find(used.begin(), used.end(), e) == used.end()) {
                    out.gated[b * of.n_expert + e] = -INFINITY;
                }
            }
        }
    }
    return result;
}

// Bit for bit, but for what was spent: that within `tolerance`.
inline void check_equal(const gate_case_result & result, const gate_case_result & expected, double tolerance) {
    for (size_t i = 0; i < expected.layers.size(); ++i) {
        CHECK(result.layers[i].exact == expected.layers[i].exact);
        CHECK(result.layers[i].chosen == expected.layers[i].chosen);
        CHECK(std::memcmp(result.layers[i].gated.data(),
                          expected.layers[i].gated.data(),
                          expected.layers[i].gated.size() * sizeof(float)) == 0);
    }
    for (size_t b = 0; b < expected.accounts.size(); ++b) {
        CHECK(std::abs(result.accounts[b].displaced - expected.accounts[b].displaced) <= tolerance);
        CHECK(result.accounts[b].n_layers == expected.accounts[b].n_layers);
        CHECK(result.accounts[b].n_biased == expected.accounts[b].n_biased);
    }
}

// How often the cases tried what they are for.
struct gate_case_counts {
    int n_bent_rows = 0;
    int n_kept_rows = 0;
    int n_drafts = 0;
    int n_short_rows = 0; // with fewer experts than k that may be chosen
    int n_ungated = 0;

    void add(const gate_case & of, const gate_case_result & expected) {
        n_drafts += of.control.drafting;
        n_ungated += !of.is_gated();
        for (const s2moe::gate_account & account : expected.accounts) {
            n_bent_rows += account.n_biased > 0;
            n_kept_rows += account.n_layers > 0 && account.n_biased == 0;
        }
        for (const auto & layer : expected.layers) {
            for (int b = 0; b < of.n_rows && of.is_gated(); ++b) {
                n_short_rows += layer.exact[b * of.n_ids + of.k - 1] < 0;
            }
        }
    }

    void check(int least) const {
        CHECK(std::min({n_bent_rows, n_kept_rows, n_drafts, n_short_rows}) >= least && n_ungated >= least / 10);
    }
};

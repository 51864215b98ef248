// The gate's rule for one layer, for the lanes of lanes.h; native/src/speculation/gate.h states it.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "lanes.h"
#include "llama-moe.h"
#include "s2moe.h"

namespace s2moe {

constexpr int max_gate_rows = 64;
constexpr int max_gate_experts = 512;

// What holds for all layers of a decode.
struct gate_control {
    double budget = 0; // this and the next four: gate_settings of speculation/gate.h
    double strength = 1;
    double residency_weight = 0.5;
    int32_t cap = 0;
    bool single_token_bias = false;
    bool drafting = false; // rows choose among what is in memory; the settings do not matter then
    int32_t k_draft = 0;
    int32_t n_rows = 0; // announced; a larger batch of the target is not gated
    double share = 0;   // displaced weight that each row may spend beyond the budget
    double prefixes[max_gate_rows] = {};
};

// What a row has spent in the layers before.
struct gate_account {
    double displaced = 0;
    int32_t n_layers = 0;
    int32_t n_biased = 0;
};

// Rows of floats, `stride_bytes` apart.
template <typename value> struct gate_matrix {
    value * data = nullptr;
    size_t stride_bytes = 0;

    S2MOE_ANYWHERE value * row(int b) const {
        return reinterpret_cast<value *>(reinterpret_cast<uintptr_t>(data) + b * stride_bytes);
    }
};

// One layer of a decode.
struct gate_layer {
    int32_t n_rows = 0;   // at most max_gate_rows
    int32_t n_expert = 0; // at most max_gate_experts
    int32_t k = 0;
    int32_t kind = 0;                    // enum llama_moe_scores
    int32_t n_ids = 0;                   // columns of exact and chosen; at least k, and k_draft when drafting
    gate_matrix<const float> scores;     // [n_rows][n_expert] of the router; -INFINITY: may not be chosen
    gate_matrix<const float> weights;    // [n_rows][n_expert] what mixing weights are taken from
    gate_matrix<float> gated;            // [n_rows][n_expert] receives the scores, or those of the chosen experts only
    const uint8_t * residency = nullptr; // [n_expert] enum s2moe_residency
    int32_t * exact = nullptr;           // [n_rows][n_ids] receives the router's choice, best first; the rest is -1
    int32_t * chosen = nullptr;          // [n_rows][n_ids] receives the choice after the gate, likewise
};

// Shared by the lanes.
struct gate_memory {
    double scores[max_gate_experts]; // l_b of one row
    double sums[max_gate_experts];   // over rows, of w_b l_b,e; then g_e
    double masses[max_gate_experts]; // over rows, of w_b
    double margins[max_gate_rows];   // m_b
    float tops[max_gate_rows];       // largest weight of a row
    double middle[2];                // of the sorted margins
    bool taken[max_gate_experts];    // chosen by this row
    bool claimed[max_gate_experts];  // chosen by an earlier row
    bool reused[max_gate_experts];   // in E*
};

S2MOE_ANYWHERE inline bool is_number(double value) {
    return value - value == 0; // neither NaN nor infinite
}

// l_b,e
S2MOE_ANYWHERE inline double gate_score(float score, int32_t kind) {
    const double value = score;
    return (kind & LLAMA_MOE_SCORES_LOG) != 0 && score > -INFINITY ? log(value) : value;
}

// Mixing weight up to the row's common factor.
S2MOE_ANYWHERE inline double mixing_weight(float weight, float top, int32_t kind) {
    return (kind & LLAMA_MOE_WEIGHTS_EXP) != 0 ? expf(weight - top) : weight;
}

S2MOE_ANYWHERE inline bool is_near(const gate_layer & layer, int e) {
    return layer.residency[e] != S2MOE_ABSENT;
}

S2MOE_ANYWHERE inline int cost_of(const gate_layer & layer, const gate_memory & memory, int e) {
    return memory.claimed[e] ? 0 : is_near(layer, e) ? 1 : 2;
}

template <class lanes_type>
S2MOE_ANYWHERE void load_scores(lanes_type & lanes, const gate_layer & layer, gate_memory & memory, int b) {
    const float * scores = layer.scores.row(b);
    lanes.each(layer.n_expert, [&](int e) {
        memory.scores[e] = gate_score(scores[e], layer.kind);
        memory.taken[e] = false;
    });
}

// Writes the router's choice of a row as exact and chosen, and with_margin its tops and margins.
template <class lanes_type>
S2MOE_ANYWHERE void
choose_exactly(lanes_type & lanes, const gate_layer & layer, gate_memory & memory, int b, bool with_margin) {
    int32_t * exact = layer.exact + b * layer.n_ids;
    int32_t * chosen = layer.chosen + b * layer.n_ids;
    const float * weights = layer.weights.row(b);
    load_scores(lanes, layer, memory, b);
    int first = -1;
    int last = -1;
    int n = 0;
    for (const int n_wanted = layer.k + (with_margin ? 1 : 0); n < n_wanted; ++n) {
        const int e =
            lanes.best(layer.n_expert, [&](int i) { return memory.taken[i] ? 0 : order_key(memory.scores[i]); });
        if (e < 0) {
            break;
        }
        lanes.at(e, [&] { memory.taken[e] = true; });
        if (n < layer.k) {
            lanes.at(n, [&] { exact[n] = chosen[n] = e; });
        }
        first = n == 0 ? e : first;
        last = e;
    }
    if (with_margin) {
        float top = -INFINITY;
        if ((layer.kind & LLAMA_MOE_WEIGHTS_EXP) != 0) {
            const int e = lanes.best(layer.n_expert, [&](int i) { return order_key(weights[i]); });
            top = e < 0 ? top : weights[e];
        }
        const bool all_are_numbers = lanes.best(layer.n_expert, [&](int i) {
            return is_number(mixing_weight(weights[i], top, layer.kind)) ? uint64_t{0} : uint64_t{1};
        }) < 0;
        lanes.at(b, [&] {
            const double margin = n > layer.k && all_are_numbers ? memory.scores[first] - memory.scores[last] : 0;
            memory.margins[b] = is_number(margin) ? margin : 0;
            memory.tops[b] = top;
        });
    }
    lanes.each(layer.n_ids, [&](int i) {
        if (i >= n || i >= layer.k) {
            exact[i] = chosen[i] = -1;
        }
    });
}

// E*, from the sums over rows.
template <class lanes_type>
S2MOE_ANYWHERE void
choose_reused(lanes_type & lanes, const gate_control & control, const gate_layer & layer, gate_memory & memory) {
    const int n = layer.n_rows;
    lanes.each(n, [&](int b) {
        int rank = 0;
        for (int other = 0; other < n; ++other) {
            rank +=
                memory.margins[other] < memory.margins[b] || (memory.margins[other] == memory.margins[b] && other < b);
        }
        if (rank == n / 2) {
            memory.middle[0] = memory.margins[b];
        }
        if (rank == n / 2 - 1) {
            memory.middle[1] = memory.margins[b];
        }
    });
    const double median = n % 2 == 1 ? memory.middle[0] : (memory.middle[0] + memory.middle[1]) / 2;
    const double residency_bonus = control.residency_weight * median;
    lanes.each(layer.n_expert, [&](int e) {
        const double mass = memory.masses[e];
        memory.sums[e] = mass > 0 ? memory.sums[e] / mass + (is_near(layer, e) ? residency_bonus : 0) : -INFINITY;
        memory.reused[e] = false;
    });
    const int cap = control.cap > 0 ? control.cap : 2 * layer.k;
    for (int i = 0; i < (cap > layer.k ? cap : layer.k); ++i) {
        const int e =
            lanes.best(layer.n_expert, [&](int j) { return memory.reused[j] ? 0 : order_key(memory.sums[j]); });
        if (e < 0) {
            break;
        }
        lanes.at(e, [&] { memory.reused[e] = true; });
    }
    lanes.each(layer.n_expert, [&](int e) {
        memory.reused[e] = memory.reused[e] || (control.single_token_bias && is_near(layer, e));
        memory.claimed[e] = false;
    });
}

// Exchanges experts of a row's exact choice for reused ones; memory.taken and layer.chosen are the choice then.
// Returns the displaced weight.
template <class lanes_type>
S2MOE_ANYWHERE double bend_row(lanes_type & lanes,
                               const gate_control & control,
                               const gate_layer & layer,
                               gate_memory & memory,
                               int b,
                               double allowance) {
    const int32_t * exact = layer.exact + b * layer.n_ids;
    int32_t * chosen = layer.chosen + b * layer.n_ids;
    const float * weights = layer.weights.row(b);
    const double prefix = control.prefixes[b];
    const double margin = memory.margins[b];
    const auto weight = [&](int e) { return mixing_weight(weights[e], memory.tops[b], layer.kind); };
    const auto biased = [&](int e) {
        const double doubt = control.single_token_bias && is_near(layer, e) ? 1 : 1 - prefix;
        return memory.scores[e] + (memory.reused[e] ? control.strength * doubt * margin : 0);
    };
    double total = 0;
    int n = 0;
    for (; n < layer.k && exact[n] >= 0; ++n) {
        const int e = exact[n];
        lanes.at(e, [&] { memory.taken[e] = true; });
        total += weight(e);
    }
    if (margin == 0 || (prefix == 1 && !control.single_token_bias)) {
        return 0; // lambda_b is 0, and without it no expert outside is better than one of the exact choice
    }
    double added = 0;
    double displaced = 0;
    for (int cost = 2; cost > 0; --cost) { // no expert costs less than 0
        for (int i = n - 1; i >= 0; --i) {
            const int out = exact[i];
            if (cost_of(layer, memory, out) != cost) {
                continue;
            }
            const int in = lanes.best(layer.n_expert, [&](int e) {
                const bool may_come = !memory.taken[e] && memory.reused[e] && cost_of(layer, memory, e) < cost;
                return may_come ? order_key(memory.scores[e]) : 0;
            });
            if (in < 0 || !(biased(in) > biased(out))) {
                continue;
            }
            const double next_total = total - weight(out) + weight(in);
            const double next_displaced = next_total > 0 ? (added + weight(in)) / next_total : 1;
            if (next_displaced > allowance) {
                continue;
            }
            lanes.at(out, [&] { memory.taken[out] = false; });
            lanes.at(in, [&] { memory.taken[in] = true; });
            lanes.at(i, [&] { chosen[i] = in; });
            total = next_total;
            added += weight(in);
            displaced = next_displaced;
        }
    }
    return displaced;
}

template <class lanes_type>
S2MOE_ANYWHERE void
write_scores(lanes_type & lanes, const gate_layer & layer, const gate_memory & memory, int b, bool all) {
    const float * scores = layer.scores.row(b);
    float * gated = layer.gated.row(b);
    lanes.each(layer.n_expert, [&](int e) { gated[e] = all || memory.taken[e] ? scores[e] : -INFINITY; });
}

// The k_draft experts of a row that a draft uses: the best of those in memory, then the best of the others.
template <class lanes_type>
S2MOE_ANYWHERE void choose_for_draft(
    lanes_type & lanes, const gate_control & control, const gate_layer & layer, gate_memory & memory, int b) {
    int32_t * chosen = layer.chosen + b * layer.n_ids;
    const float * scores = layer.scores.row(b);
    lanes.each(layer.n_expert, [&](int e) { memory.taken[e] = false; });
    int n = 0;
    for (; n < control.k_draft; ++n) {
        const int e = lanes.best(layer.n_expert, [&](int i) {
            // a float's key as a double loses nothing with its last bit
            const uint64_t key = memory.taken[i] ? 0 : order_key(scores[i]) >> 1;
            return key != 0 && layer.residency[i] == S2MOE_RESIDENT ? key | uint64_t{1} << 63 : key;
        });
        if (e < 0) {
            break;
        }
        lanes.at(e, [&] { memory.taken[e] = true; });
        lanes.at(n, [&] { chosen[n] = e; });
    }
    lanes.each(layer.n_ids, [&](int i) {
        if (i >= n) {
            chosen[i] = -1;
        }
    });
    write_scores(lanes, layer, memory, b, false);
}

/*
 * One layer of a decode as expert_gate::run_layer() does it.
 *
 *   accounts  [n_rows] of the target's rows, carried from layer to layer; zero before the first
 */
template <class lanes_type>
S2MOE_ANYWHERE void gate_layer_rows(lanes_type & lanes,
                                    const gate_control & control,
                                    const gate_layer & layer,
                                    gate_account * accounts,
                                    gate_memory & memory) {
    if (!control.drafting && layer.n_rows > control.n_rows) { // not a batch that was announced
        for (int b = 0; b < layer.n_rows; ++b) {
            write_scores(lanes, layer, memory, b, true);
        }
        return;
    }
    const bool bends = !control.drafting && !(control.budget <= 0) && !(control.strength <= 0) &&
                       (layer.n_rows > 1 || control.single_token_bias);
    lanes.each(layer.n_expert, [&](int e) { memory.sums[e] = memory.masses[e] = 0; });
    for (int b = 0; b < layer.n_rows; ++b) {
        choose_exactly(lanes, layer, memory, b, bends);
        const double prefix = control.prefixes[b];
        lanes.each(bends ? layer.n_expert : 0, [&](int e) {
            if (memory.scores[e] > -INFINITY) { // a number, too
                memory.sums[e] += prefix * memory.scores[e];
                memory.masses[e] += prefix;
            }
        });
    }
    if (bends) {
        choose_reused(lanes, control, layer, memory);
    }
    for (int b = 0; b < layer.n_rows; ++b) {
        if (control.drafting) {
            choose_for_draft(lanes, control, layer, memory, b);
            continue;
        }
        double displaced = 0;
        if (bends) {
            const gate_account & before = accounts[b];
            const double allowance = control.budget * (before.n_layers + 1) + control.share - before.displaced;
            load_scores(lanes, layer, memory, b);
            displaced = bend_row(lanes, control, layer, memory, b, allowance);
            lanes.meet();
            lanes.each(layer.n_expert, [&](int e) { memory.claimed[e] = memory.claimed[e] || memory.taken[e]; });
        }
        write_scores(lanes, layer, memory, b, !(displaced > 0));
        lanes.at(b, [&] {
            accounts[b].n_layers += 1;
            accounts[b].displaced += displaced;
            accounts[b].n_biased += displaced > 0;
        });
    }
}

} // namespace s2moe

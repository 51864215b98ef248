#include "gate.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "experts/barrier.h"
#include "ggml.h"
#include "llama.h"

namespace s2moe {

namespace {

constexpr double likely_share = 0.625; // of the k experts that a draft predicts: read ahead (docs/speculation.md)
constexpr double no_score = -std::numeric_limits<double>::infinity();

// The k best indices of `values`, best first; ties: the lower one. Those of no_score are left out.
std::vector<int> best(std::span<const double> values, int k) {
    std::vector<int> order;
    for (size_t i = 0; i < values.size(); ++i) {
        if (values[i] > no_score) {
            order.push_back(static_cast<int>(i));
        }
    }
    const auto n = std::min<size_t>(k, order.size());
    std::partial_sort(order.begin(), order.begin() + static_cast<int64_t>(n), order.end(), [&](int a, int b) {
        return values[a] != values[b] ? values[a] > values[b] : a < b;
    });
    order.resize(n);
    return order;
}

// One row as the rule sees it.
struct gated_row {
    std::vector<double> scores;  // l_b
    std::vector<double> weights; // mixing weights up to a common factor
    double margin = 0;           // m_b
    bool is_finite = true;       // all weights
};

gated_row read_row(const gate_input & input, int row) {
    gated_row result;
    const float * scores = input.scores + static_cast<size_t>(row) * input.n_expert;
    const float * weights = input.weights + static_cast<size_t>(row) * input.n_expert;
    float top = -INFINITY;
    for (int e = 0; e < input.n_expert; ++e) {
        top = std::max(top, weights[e]);
    }
    for (int e = 0; e < input.n_expert; ++e) {
        const double score = (input.kind & LLAMA_MOE_SCORES_LOG) != 0 && scores[e] > -INFINITY
                                 ? std::log(static_cast<double>(scores[e]))
                                 : static_cast<double>(scores[e]);
        result.scores.push_back(std::isnan(score) ? no_score : score);
        result.weights.push_back((input.kind & LLAMA_MOE_WEIGHTS_EXP) != 0 ? std::exp(weights[e] - top) : weights[e]);
        result.is_finite = result.is_finite && std::isfinite(result.weights.back());
    }
    return result;
}

double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    if (values.size() % 2 == 1) {
        return *middle;
    }
    return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

// E*, as flags [n_expert].
std::vector<uint8_t> reused_experts(const gate_settings & settings,
                                    const gate_input & input,
                                    std::span<const double> prefixes,
                                    const std::vector<gated_row> & rows) {
    std::vector<double> margins;
    margins.reserve(rows.size());
    for (const gated_row & row : rows) {
        margins.push_back(row.margin);
    }
    const double residency_bonus = settings.residency_weight * median(margins);
    std::vector<double> g(input.n_expert, no_score);
    for (int e = 0; e < input.n_expert; ++e) {
        double sum = 0;
        double weight = 0;
        for (size_t b = 0; b < rows.size(); ++b) {
            if (rows[b].scores[e] > no_score) {
                sum += prefixes[b] * rows[b].scores[e];
                weight += prefixes[b];
            }
        }
        if (weight > 0) {
            g[e] = sum / weight + (input.residency[e] != S2MOE_ABSENT ? residency_bonus : 0);
        }
    }
    std::vector<uint8_t> result(input.n_expert, 0);
    for (const int e : best(g, std::max(input.k, settings.cap > 0 ? settings.cap : 2 * input.k))) {
        result[e] = 1;
    }
    if (settings.single_token_bias) {
        for (int e = 0; e < input.n_expert; ++e) {
            result[e] |= input.residency[e] != S2MOE_ABSENT;
        }
    }
    return result;
}

} // namespace

std::vector<gate_choice> choose_experts(const gate_settings & settings,
                                        const gate_input & input,
                                        std::span<const double> prefixes,
                                        std::span<const double> allowances) {
    std::vector<gated_row> rows;
    std::vector<gate_choice> choices(input.n_rows);
    for (int b = 0; b < input.n_rows; ++b) {
        rows.push_back(read_row(input, b));
        const std::vector<int> order = best(rows[b].scores, input.k + 1);
        if (static_cast<int>(order.size()) > input.k && rows[b].is_finite) {
            const double margin = rows[b].scores[order.front()] - rows[b].scores[order.back()];
            rows[b].margin = std::isfinite(margin) ? margin : 0;
        }
        choices[b].exact.assign(order.begin(),
                                order.begin() + std::min<int64_t>(input.k, static_cast<int64_t>(order.size())));
        choices[b].chosen = choices[b].exact;
    }
    if (settings.budget <= 0 || settings.strength <= 0 || (input.n_rows == 1 && !settings.single_token_bias)) {
        return choices;
    }
    const std::vector<uint8_t> reused = reused_experts(settings, input, prefixes, rows);
    std::vector<uint8_t> claimed(input.n_expert, 0); // chosen by an earlier row
    const auto cost = [&](int e) { return claimed[e] != 0 ? 0 : input.residency[e] != S2MOE_ABSENT ? 1 : 2; };
    for (int b = 0; b < input.n_rows; ++b) {
        const gated_row & row = rows[b];
        gate_choice & choice = choices[b];
        const auto biased = [&](int e) {
            const bool bends = settings.single_token_bias && input.residency[e] != S2MOE_ABSENT;
            const double doubt = bends ? 1 : 1 - prefixes[b];
            return row.scores[e] + (reused[e] != 0 ? settings.strength * doubt * row.margin : 0);
        };
        std::vector<uint8_t> taken(input.n_expert, 0);
        double total = 0;
        for (const int e : choice.exact) {
            taken[e] = 1;
            total += row.weights[e];
        }
        std::vector<int> leaving(choice.exact.rbegin(), choice.exact.rend()); // the least scored first
        std::stable_sort(leaving.begin(), leaving.end(), [&](int x, int y) { return cost(x) > cost(y); });
        double added = 0;
        for (const int out : leaving) {
            int in = -1;
            for (int e = 0; e < input.n_expert; ++e) {
                if (taken[e] == 0 && reused[e] != 0 && cost(e) < cost(out) && row.scores[e] > no_score &&
                    (in < 0 || row.scores[e] > row.scores[in])) {
                    in = e;
                }
            }
            if (in < 0 || !(biased(in) > biased(out))) {
                continue;
            }
            const double next_total = total - row.weights[out] + row.weights[in];
            const double displaced = next_total > 0 ? (added + row.weights[in]) / next_total : 1;
            if (displaced > allowances[b]) {
                continue;
            }
            taken[out] = 0;
            taken[in] = 1;
            total = next_total;
            added += row.weights[in];
            choice.displaced = displaced;
            std::replace(choice.chosen.begin(), choice.chosen.end(), out, in);
        }
        for (const int e : choice.chosen) {
            claimed[e] = 1;
        }
    }
    return choices;
}

std::vector<int> choose_resident(const gate_input & input, int row, int k) {
    const float * scores = input.scores + static_cast<size_t>(row) * input.n_expert;
    std::vector<int> order(input.n_expert);
    std::iota(order.begin(), order.end(), 0);
    std::erase_if(order, [&](int e) { return !(scores[e] > -INFINITY); });
    const auto n = std::min<size_t>(k, order.size());
    std::partial_sort(order.begin(), order.begin() + static_cast<int64_t>(n), order.end(), [&](int a, int b) {
        const bool there_a = input.residency[a] == S2MOE_RESIDENT;
        const bool there_b = input.residency[b] == S2MOE_RESIDENT;
        if (there_a != there_b) {
            return there_a;
        }
        return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    });
    order.resize(n);
    return order;
}

// ── in a context ─────────────────────────────────────────────────────────────────────────────────

expert_gate::expert_gate(llama_context * ctx, expert_cache * experts)
    : ctx(ctx), experts(experts), n_layers(llama_model_n_layer(llama_get_model(ctx))),
      n_experts(llama_moe_model_n_expert(llama_get_model(ctx))), layers(n_layers), residency(n_layers * n_experts),
      resident_set(n_layers, n_experts) {
    static std::atomic<int32_t> n_gates = 0;
    const int32_t serial = ++n_gates;
    for (int i = 0; i < n_layers; ++i) {
        layers[i] = {this, i, 0, 0, serial};
    }
    const int n_ids = llama_moe_model_n_expert_used(llama_get_model(ctx));
    if (n_experts > max_gate_experts || n_ids == 0) {
        return;
    }
    if (experts != nullptr) {
        device = experts->create_gate(n_layers, n_experts, n_ids);
    }
#if S2MOE_CUDA_ENABLED
    if (const int gpu = llama_moe_gpu(ctx); device == nullptr && experts == nullptr && gpu >= 0) {
        device = create_cuda_gate(gpu, n_layers, n_experts, n_ids);
    }
#endif
}

expert_gate::~expert_gate() {
    end();
}

void expert_gate::note_synchronization() {
    if (experts != nullptr) {
        experts->note_synchronization();
    }
}

void expert_gate::snapshot() {
    resident_set = expert_set(n_layers, n_experts);
    if (experts == nullptr) {
        std::fill(residency.begin(), residency.end(), static_cast<uint8_t>(S2MOE_RESIDENT));
    } else {
        const int n_stored = experts->n_expert_max();
        std::vector<uint8_t> all(experts->layout.layers.size() * n_stored);
        experts->residency(all);
        for (size_t i = 0; i < experts->layout.layers.size(); ++i) {
            const size_t to = static_cast<size_t>(experts->layout.layers[i].layer) * n_experts;
            std::copy_n(all.begin() + static_cast<int64_t>(i * n_stored),
                        std::min(n_stored, n_experts),
                        residency.begin() + static_cast<int64_t>(to));
        }
    }
    for (int layer = 0; layer < n_layers; ++layer) {
        for (int e = 0; e < n_experts; ++e) {
            if (residency[layer * n_experts + e] == S2MOE_RESIDENT) {
                resident_set.add(layer, e);
            }
        }
    }
}

void expert_gate::begin_draft(int n) {
    drafting = true;
    k_draft = n;
    snapshot();
    results.assign(1, {});
    results[0].exact = results[0].likely = results[0].chosen = expert_set(n_layers, n_experts);
    begin_on_device(0);
    llama_moe_set_gate(ctx, run, layers.data());
}

void expert_gate::begin_target(const gate_settings & chosen, std::span<const double> row_prefixes, double credit) {
    drafting = false;
    settings = chosen;
    prefixes.assign(row_prefixes.begin(), row_prefixes.end());
    share = credit / static_cast<double>(prefixes.size());
    snapshot();
    results.assign(prefixes.size(), {});
    for (row_result & each : results) {
        each.exact = each.chosen = expert_set(n_layers, n_experts);
    }
    begin_on_device(static_cast<int>(prefixes.size()));
    llama_moe_set_gate(ctx, run, layers.data());
}

void expert_gate::end() {
    llama_moe_set_gate(ctx, nullptr, nullptr);
    awaits_device = false;
}

void expert_gate::begin_on_device(int n_rows) {
    if (device == nullptr) {
        return;
    }
    // of a larger batch some layers may have few rows, and come to the device all the same: they pass
    const bool fits = n_rows <= max_gate_rows;
    gate_control control;
    control.drafting = drafting;
    control.k_draft = drafting ? k_draft : 0;
    if (!drafting && fits) {
        control.budget = settings.budget;
        control.strength = settings.strength;
        control.residency_weight = settings.residency_weight;
        control.cap = settings.cap;
        control.single_token_bias = settings.single_token_bias;
        control.n_rows = n_rows;
        control.share = share;
        std::copy(prefixes.begin(), prefixes.end(), control.prefixes);
    }
    device->begin(control, residency.data());
    note_synchronization();
    awaits_device = fits;
}

// Layers that the CPU computed have their results already.
void expert_gate::collect(int n_rows) {
    if (!awaits_device || n_rows > max_gate_rows) {
        return;
    }
    const gate_outcome outcome = device->read(n_rows);
    note_synchronization();
    if (drafting) {
        add_drafted(outcome, n_rows);
    } else {
        add_chosen(outcome, n_rows);
    }
}

void expert_gate::add_drafted(const gate_outcome & outcome, int n_rows) {
    row_result & result = results[0];
    for (int layer = 0; layer < n_layers; ++layer) {
        const auto first = (static_cast<size_t>(layer) * n_rows + n_rows - 1) * outcome.n_ids;
        const auto ids = std::span(outcome.exact).subspan(first, outcome.n_ids);
        const auto n_exact = std::count_if(ids.begin(), ids.end(), [](int32_t e) { return e >= 0; });
        const auto n_likely = std::lround(likely_share * static_cast<double>(n_exact));
        for (int32_t i = 0; i < n_exact; ++i) {
            result.exact.add(layer, ids[i]);
            if (i < n_likely) {
                result.likely.add(layer, ids[i]);
            }
        }
        for (int32_t i = 0; i < outcome.n_ids; ++i) {
            const int32_t e = outcome.chosen[first + i];
            if (e >= 0 && residency[layer * n_experts + e] == S2MOE_RESIDENT) {
                result.chosen.add(layer, e);
            }
        }
    }
}

void expert_gate::add_chosen(const gate_outcome & outcome, int n_rows) {
    for (int b = 0; b < n_rows; ++b) {
        row_result & result = results[b];
        for (int layer = 0; layer < n_layers; ++layer) {
            const auto first = (static_cast<size_t>(layer) * n_rows + b) * outcome.n_ids;
            for (int32_t i = 0; i < outcome.n_ids; ++i) {
                if (const int32_t e = outcome.exact[first + i]; e >= 0) {
                    result.exact.add(layer, e);
                }
                if (const int32_t e = outcome.chosen[first + i]; e >= 0) {
                    result.chosen.add(layer, e);
                }
            }
        }
        result.n_layers += outcome.accounts[b].n_layers;
        result.displaced += outcome.accounts[b].displaced;
        result.n_biased += outcome.accounts[b].n_biased;
    }
}

void expert_gate::forget(int n_rows) {
    results.assign(n_rows, {});
}

bool expert_gate::some_are_missing() const {
    if (experts == nullptr) {
        return false;
    }
    uint64_t n = 0;
    for (const expert_layer & layer : experts->layout.layers) {
        n += layer.n_expert;
    }
    return experts->n_at_hand() < n;
}

void expert_gate::run(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return; // ggml calls every thread
    }
    acquire_from_others();
    const auto & layer = *static_cast<const llama_moe_gate_layer *>(userdata);
    auto & gate = *static_cast<expert_gate *>(layer.owner);
    if (gate.device == nullptr || !gate.device->run_on_host(dst, layer)) {
        gate.run_layer(dst, layer);
    }
    release_to_others();
}

// `dst` receives the scores as they are, or those of the chosen experts only.
void expert_gate::run_layer(ggml_tensor * dst, const llama_moe_gate_layer & layer) {
    const size_t n_bytes = dst->ne[0] * sizeof(float);
    const auto n_rows = static_cast<int>(dst->ne[1]);
    std::vector<float> scores(dst->ne[0] * n_rows);
    std::vector<float> weights(dst->ne[0] * n_rows);
    for (int b = 0; b < n_rows; ++b) {
        const auto * from = static_cast<const char *>(dst->src[0]->data) + b * dst->src[0]->nb[1];
        std::memcpy(scores.data() + b * dst->ne[0], from, n_bytes);
        from = static_cast<const char *>(dst->src[1]->data) + b * dst->src[1]->nb[1];
        std::memcpy(weights.data() + b * dst->ne[0], from, n_bytes);
        std::memcpy(static_cast<char *>(dst->data) + b * dst->nb[1], scores.data() + b * dst->ne[0], n_bytes);
    }
    const gate_input input = {.n_rows = n_rows,
                              .n_expert = static_cast<int>(dst->ne[0]),
                              .k = layer.k,
                              .scores = scores.data(),
                              .weights = weights.data(),
                              .kind = layer.scores,
                              .residency = std::span(residency).subspan(static_cast<size_t>(layer.layer) * n_experts,
                                                                        static_cast<size_t>(n_experts))};
    if (input.n_expert > n_experts || (!drafting && n_rows > static_cast<int>(results.size()))) {
        return; // not a batch that was announced
    }
    std::vector<double> allowances;
    for (int b = 0; b < n_rows && !drafting; ++b) {
        allowances.push_back(settings.budget * (results[b].n_layers + 1) + share - results[b].displaced);
    }
    const auto keep_only = [&](int b, const std::vector<int> & chosen) {
        auto * to = reinterpret_cast<float *>(static_cast<char *>(dst->data) + b * dst->nb[1]);
        std::fill_n(to, dst->ne[0], -INFINITY);
        for (const int e : chosen) {
            to[e] = scores[b * dst->ne[0] + e];
        }
    };
    if (drafting) {
        const std::vector<double> none(n_rows, 0);
        const auto choices = choose_experts({}, input, none, none);
        const auto n_likely = static_cast<size_t>(std::lround(likely_share * input.k));
        for (size_t i = 0; i < choices.back().exact.size(); ++i) {
            results[0].exact.add(layer.layer, choices.back().exact[i]);
            if (i < n_likely) {
                results[0].likely.add(layer.layer, choices.back().exact[i]);
            }
        }
        for (int b = 0; b < n_rows; ++b) {
            const std::vector<int> chosen = choose_resident(input, b, k_draft);
            keep_only(b, chosen);
            for (const int e : chosen) {
                if (b == n_rows - 1 && input.residency[e] == S2MOE_RESIDENT) {
                    results[0].chosen.add(layer.layer, e);
                }
            }
        }
        return;
    }
    const auto choices = choose_experts(settings, input, prefixes, allowances);
    for (int b = 0; b < n_rows; ++b) {
        row_result & result = results[b];
        for (const int e : choices[b].exact) {
            result.exact.add(layer.layer, e);
        }
        for (const int e : choices[b].chosen) {
            result.chosen.add(layer.layer, e);
        }
        result.n_layers += 1;
        result.displaced += choices[b].displaced;
        if (choices[b].displaced > 0) {
            result.n_biased += 1;
            keep_only(b, choices[b].chosen);
        }
    }
}

} // namespace s2moe

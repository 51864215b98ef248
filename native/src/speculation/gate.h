// Which experts the rows of a batch use: the router's choice, bent towards experts that cost less.
//
// Two halves: choose_experts() is the rule for one layer, a pure function; expert_gate puts it between the router and
// its top-k in every layer of a context, and keeps what it saw. A kernel for another backend replaces the first and
// fills the second.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "expert_set.h"
#include "experts/cache.h"
#include "gate_device.h"
#include "llama-moe.h"

namespace s2moe {

struct gate_settings {
    double budget = 0;             // displaced weight allowed per token and layer; 0: the router's choice
    double strength = 1;           // of the bias, in margins m_b
    double residency_weight = 0.5; // mu
    int cap = 0;                   // experts in E*; 0: 2 k
    bool single_token_bias = false;
};

// Scores of one layer: [n_rows][n_expert], row after row.
struct gate_input {
    int n_rows = 0;
    int n_expert = 0;
    int k = 0;
    const float * scores = nullptr;     // the router's selection scores; -INFINITY: may not be chosen
    const float * weights = nullptr;    // what mixing weights are taken from
    int32_t kind = 0;                   // enum llama_moe_scores
    std::span<const uint8_t> residency; // [n_expert], enum s2moe_residency
};

struct gate_choice {
    std::vector<int> exact;  // [k] the router's, best first; ties: the lower id
    std::vector<int> chosen; // [k] after the gate
    double displaced = 0;    // share of the chosen experts' mixing weights that is not on exact ones
};

/*
 * The rule (design: "Reuse gating"), with l_b the scores of row b (their logarithms, if they are probabilities), w_b
 * its prefix confidence, m_b = l_b,(1) - l_b,(k+1), and r_e = 1 for an expert that is in memory or on its way:
 *
 *   g_e      = sum_b w_b l_b,e / sum_b w_b + mu r_e median_b(m_b)         over rows; scores of -INFINITY are left out,
 *                                                                         an expert that no row may choose has none
 *   E*       = the `cap` experts with the largest g (ties: the lower id); with single_token_bias also all with r_e = 1
 *   lambda_b = strength (1 - w_b) m_b;  with single_token_bias, for experts with r_e = 1: strength m_b
 *   l'_b,e   = l_b,e + lambda_b [e in E*]
 *
 * An expert `out` of the router's choice gives way to the best-scored `in` of E* that is not chosen yet, if
 * l'_b,in > l'_b,out, if `in` costs less, and if the row's displaced weight stays within its allowance. Costs: 0 for an
 * expert that an earlier row of this batch has chosen, 1 for another one in memory or on its way, 2 for one that is
 * not. The most expensive give way first, of equally expensive ones the least scored. Rows are taken in the order of
 * the batch, so ancestors come before descendants. A row with lambda_b = 0 keeps the router's choice.
 * m_b is 0 where it is not finite, or a mixing weight of the row is not; an expert whose score is no number may not be
 * chosen.
 *
 *   prefixes    [n_rows] w_b; 1 for the root
 *   allowances  [n_rows] displaced weight that the row may spend in this layer
 */
std::vector<gate_choice> choose_experts(const gate_settings & settings,
                                        const gate_input & input,
                                        std::span<const double> prefixes,
                                        std::span<const double> allowances);

// The k experts a draft uses: the best of those in memory, then the best of the others (which count as zero).
std::vector<int> choose_resident(const gate_input & input, int row, int k);

// The gate of one context. Used by the thread that decodes; the operation runs on a compute thread meanwhile.
class expert_gate {
  public:
    expert_gate(llama_context * ctx, expert_cache * experts);
    ~expert_gate();
    expert_gate(const expert_gate &) = delete;
    expert_gate & operator=(const expert_gate &) = delete;

    // Before a decode of drafts with k_draft experts: routing is masked to what is in memory. rows() then has one
    // element, of the last row.
    void begin_draft(int k_draft);

    /*
     * Before a decode of the target. Row b may spend settings.budget per layer that it has passed, and its part of what
     * the response has saved.
     *
     *   prefixes  [n_rows]
     *   credit    displaced weight that the response may still spend beyond that, shared by the rows
     */
    void begin_target(const gate_settings & settings, std::span<const double> prefixes, double credit);

    void end(); // takes the gate out of the context

    // After a decode of n_rows rows that did not fail, before rows(): fetches what a GPU chose.
    void collect(int n_rows);

    // Computes layers on a GPU; nullptr: the CPU does.
    gate_device * on_device() const {
        return device.get();
    }

    // The operation in the graph. userdata: llama_moe_gate_layer, whose owner is an expert_gate.
    static void run(ggml_tensor * dst, int ith, int nth, void * userdata);

    // Before a decode without the gate: rows() then has n_rows elements that say nothing.
    void forget(int n_rows);

    // Whether any expert of a layer with experts is not in memory now.
    bool some_are_missing() const;

    // of the last decode, by row
    struct row_result {
        expert_set exact;     // the router's choice with all k experts
        expert_set likely;    // of a draft: the best of them, which the target is most likely to choose, too
        expert_set chosen;    // after the gate; of a draft: what it used
        double displaced = 0; // sum over layers
        int n_layers = 0;
        int n_biased = 0; // layers with another choice than the router's
    };
    const std::vector<row_result> & rows() const {
        return results;
    }
    // Experts that were in memory when begin_...() was called, without those on their way.
    const expert_set & resident() const {
        return resident_set;
    }
    int n_layer() const {
        return n_layers;
    }
    int n_expert() const {
        return n_experts;
    }

  private:
    void run_layer(ggml_tensor * dst, const llama_moe_gate_layer & layer);
    void snapshot();
    void note_synchronization();
    void begin_on_device(int n_rows);
    void add_drafted(const gate_outcome & outcome, int n_rows);
    void add_chosen(const gate_outcome & outcome, int n_rows);

    llama_context * ctx;
    expert_cache * experts;
    int n_layers;
    int n_experts;
    std::vector<llama_moe_gate_layer> layers; // [n_layer]
    std::vector<uint8_t> residency;           // [n_layer][n_expert]
    expert_set resident_set;

    bool drafting = false;
    int k_draft = 0;
    gate_settings settings;
    std::vector<double> prefixes;
    double share = 0; // of the credit, per row
    std::unique_ptr<gate_device> device;
    bool awaits_device = false; // a decode has begun there
    std::vector<row_result> results;
};

} // namespace s2moe

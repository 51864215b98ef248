// One step of speculative decoding: draft, verify, accept, commit.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cost_model.h"
#include "counters.h"
#include "draft.h"
#include "drafted_tree.h"
#include "expansion.h"
#include "options.h"
#include "regime.h"
#include "verify.h"

namespace s2moe {

// Everything that s2moe.h says of s2moe_speculator, with exceptions instead of statuses.
class speculator {
  public:
    // Chooses the token behind the row of logits at `index`; the chosen token is then the sampler's, too.
    using chooser = std::function<llama_token(int32_t index)>;

    speculator(llama_context * ctx, llama_context * draft_ctx, const char * state_json);

    void begin(const char * options_json);
    void feed(std::span<const llama_token> tokens);

    // Returns 1 to min(n_max, S2MOE_N_VERIFY_ROWS) tokens.
    std::vector<llama_token> step(llama_token root, llama_pos position, int n_max, const chooser & choose);

    const std::vector<s2moe_committed_row> & rows() const {
        return committed_rows;
    }
    llama_context * context() const {
        return ctx;
    }
    std::string report() const;
    std::string state() const;

  private:
    using clock = std::chrono::steady_clock;

    bool may_draft(int n_nodes) const;
    bool may_pay() const;
    // Whether the controller decides if steps draft.
    bool is_paced() const {
        return options.method == draft_method::s2moe && options.adaptive;
    }
    int room(llama_pos position, int n_max) const;
    drafter & active_drafter();
    drafted_tree draft(llama_token root, llama_pos position, int n_nodes);
    draft_view evaluate_draft(drafter & by, int parent, llama_token token);
    std::pair<int, int> fixed_shape(int n_nodes) const;
    bool tells_of_length(const drafted_tree & tree, int n_nodes) const;
    void disable(const char * reason, const std::string & detail);
    void prefetch(std::span<const s2moe_expert_id> missing);
    struct pins;
    void pin(const expert_set & wanted);
    void unpin();
    void learn_costs(const expert_set & touched, bool drafted, double seconds);
    void
    count_ungated(const s2moe_expert_stats & before, const s2moe_expert_stats & after, bool drafted, double seconds);
    void count_experts(const drafted_tree & tree, double seconds);
    std::vector<llama_token> step_plainly(llama_token root, llama_pos position, const chooser & choose);
    void accept(const drafted_tree & tree,
                int n_max,
                const chooser & choose,
                std::vector<llama_token> & tokens,
                std::vector<int> & path);
    void commit(const drafted_tree & tree, const std::vector<int> & path, bool gated);
    expansion_costs costs() const;
    double credit() const;

    llama_context * ctx;
    expert_cache * experts;
    const llama_vocab * vocab;
    const bool draftable;
    const bool branches;
    int k;
    int n_expert;
    int n_moe_layers;
    int n_sequences;

    std::unique_ptr<verifier> target; // null where nothing can be drafted
    std::unique_ptr<drafter> shared_drafter;
    std::unique_ptr<drafter> own_drafter; // with a context of its own

    speculation_options options;
    bool begun = false;
    bool has_pinned = false;
    speculation_counters counters;
    int64_t n_decodes = 0; // of the context, in this response
    int64_t n_reuses_before = 0;
    std::vector<llama_token> history; // committed tokens, for a drafter with a context of its own
    std::vector<s2moe_committed_row> committed_rows;

    cost_model verify_costs;
    cost_model draft_costs;
    regimes by_key;
    regime none;             // before begin()
    regime * learnt = &none; // of this response
};

} // namespace s2moe

// The length of a chain of drafts by trial: the baseline "cascade" (after arXiv 2506.20675).

#pragma once

#include <cstddef>
#include <vector>

namespace s2moe {

// Tests the lengths 0, 1, 2, 4 and 7 for a few steps each, then keeps to the one with the most tokens per second for a
// while, and tests again. While length 0 wins, the time between tests doubles.
class cascade {
  public:
    // Longer ones are not tested, but `longest` is, >= 1. Starts over if that was another number before.
    void limit(int longest);

    // Of the coming step.
    int length() const {
        return lengths[testing ? tested : chosen];
    }
    // What a step of that length gave.
    void end_step(int n_tokens, double seconds);

  private:
    struct trial {
        double tokens = 0;
        double seconds = 0;
    };

    std::vector<int> lengths = {0, 1, 2, 4, 7};
    bool testing = true;
    size_t tested = 0;
    size_t chosen = 0;
    int n_left = test_steps;
    int patience = 1; // by which the time between tests is multiplied
    std::vector<trial> trials = std::vector<trial>(lengths.size());

    static constexpr int test_steps = 4;
    static constexpr int set_steps = 16;
    static constexpr int patience_max = 8;
};

} // namespace s2moe

// How far the draft's confidence can be believed.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace s2moe {

// Observed acceptance against the confidence of the draft, by tenth of confidence and by depth.
//
// The correction of a tenth at a depth is (accepted - sum of confidences) / (n + 20), shrunk towards that of the other
// depths instead of towards zero; zero while nothing was observed. The corrected values at the middles of the tenths
// are made non-decreasing (neighbours that are out of order are pooled, by what was observed of them) and joined by
// straight lines, so that a larger confidence never yields a smaller value.
class calibration {
  public:
    static constexpr int n_tenths = 10;
    static constexpr int n_depths = 8; // the last one stands for all below it

    // Observed drafts that had about the same probability of acceptance.
    struct judged {
        int64_t n = 0;
        int64_t accepted = 0;
        double expected = 0; // sum of these probabilities
    };
    // [depth - 1][tenth of the probability]
    using judged_drafts = std::array<std::array<judged, n_tenths>, n_depths>;

    // confidence: probability that the draft gives the token, 0..1, other values are clamped and NaN is 0;
    // depth: 1 for a child of the root. Returns the probability of acceptance given that the parent was accepted.
    double calibrated(double confidence, int depth) const;

    // accepted: whether the verified model chose this token after the same prefix. Only drafts whose parent was
    // accepted tell that. confidence: the draft's own, not a calibrated one.
    void observe(double confidence, int depth, bool accepted);

    // What was observed since the last call, by the probability that calibrated() gave just before.
    judged_drafts take_judged();

    // load() changes nothing and returns false where the numbers are not a state of this version, or not possible.
    std::vector<double> save() const;
    bool load(std::span<const double> state);

  private:
    // Decayed sums.
    struct tally {
        double n = 0;
        double confidence = 0;
        double accepted = 0;
    };

    using row = std::array<tally, n_tenths>;
    std::array<double, n_tenths> curve(int depth) const;

    std::array<row, n_depths> tallies{};
    judged_drafts fresh{}; // not kept
};

} // namespace s2moe

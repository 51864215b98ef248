// What an evaluation costs, learnt from the evaluations themselves.

#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace s2moe {

// What one evaluation had to do.
struct work_counts {
    int rows = 1;   // of the batch
    int hits = 0;   // distinct (layer, expert) pairs that were resident
    int misses = 0; // distinct pairs that were not
};

// seconds = intercept + row * rows + hit * hits + miss * misses, the four coefficients >= 0, by recursive least
// squares in information form: sums of products that forget, solved anew after each observation.
//
// An observation counts inversely to its predicted seconds, as the variance of a sum of many small waits does.
// Forgetting is by kind: what was observed of a kind of evaluation (by number of rows and share of misses) fades with
// each observation of any kind, but not below the weight of a quarter of an observation. So weeks of single rows do
// not wash out what is known of batches, nor do weeks without a miss what a miss costs. What was never observed stays
// at a rough prior, scaled so that the first observation is met.
//
// A residual counts as 4 times the usual one at most (Huber's weight), so a stalled evaluation moves little. Three such
// on end are a change: they count in full, and what was known before is reduced to those quarters.
class cost_model {
  public:
    // keep: what an observation still weighs after the next one, 0.5 <= keep <= 1; 1 never forgets
    explicit cost_model(double keep = 0.98);

    // Seconds, >= 0; 0 while nothing is known.
    double predict(const work_counts & work) const;
    // Seconds that more work of this kind would add to an evaluation: no intercept.
    double marginal(const work_counts & extra) const;

    // Numbers that no evaluation has (negative counts, seconds not finite and positive) are ignored.
    void observe(const work_counts & work, double seconds);

    // Whether a marginal cost may be relied on: 16 observations, 4 of them single rows and 4 of several rows.
    bool ready() const;
    double n_observed() const;

    struct fit {
        double r2 = 0;   // 1 - sum of squared errors / sum of squared deviations from the mean; may be negative
        double mape = 0; // mean of |error| / measured
        int n = 0;
        double intercept = 0, row = 0, hit = 0, miss = 0; // seconds
    };
    // How well the last 256 observations were predicted before they were learnt.
    fit quality() const;
    // Those predictions and measurements in seconds, oldest first.
    std::vector<std::pair<double, double>> samples() const;

    // What was learnt, without the samples. load() changes nothing and returns false where the numbers are not a
    // state of this version, or not finite.
    std::vector<double> save() const;
    bool load(std::span<const double> state);

  private:
    static constexpr size_t n_features = 4;
    static constexpr size_t n_samples_max = 256;
    static constexpr size_t n_kinds = 12;
    using vector = std::array<double, n_features>;
    using matrix = std::array<vector, n_features>;

    // Decayed sums over observations of one kind: of their weights, of x x' and of x * measured.
    struct sums {
        double weight = 0;
        matrix squares{};
        vector products{};
    };

    static size_t kind_of(const work_counts & work);
    void begin(const vector & work, double seconds);
    void learn(size_t kind, const vector & x, double measured);
    void fade(double keep);
    bool solve_again();
    vector coefficients() const;

    double keep;

    // Everything is learnt in units of the prior: x = work * unit / weight, and scaled[i] = 1 is the prior itself.
    vector unit{}; // prior coefficients in seconds
    std::array<sums, n_kinds> kinds{};
    vector scaled{};              // coefficients
    double reference_seconds = 0; // of the first observation
    double usual_residual = 0;    // standard deviation, in units of the weight
    double streak = 0;            // observations clipped since the last one that was not
    double n_seen = 0, n_single = 0, n_several = 0;

    std::vector<std::pair<double, double>> ring;
    size_t ring_next = 0;
};

} // namespace s2moe

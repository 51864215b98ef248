#include "cascade.h"

#include <algorithm>

namespace s2moe {

void cascade::limit(int longest) {
    std::vector<int> allowed;
    for (const int length : cascade().lengths) {
        if (allowed.empty() || allowed.back() < longest) {
            allowed.push_back(std::min(length, longest));
        }
    }
    if (allowed != lengths) {
        *this = {};
        lengths = allowed;
        trials.resize(lengths.size());
    }
}

void cascade::end_step(int n_tokens, double seconds) {
    if (testing) {
        trials[tested].tokens += n_tokens;
        trials[tested].seconds += seconds;
    }
    if (--n_left > 0) {
        return;
    }
    if (!testing) { // start over
        testing = true;
        tested = 0;
        trials.assign(lengths.size(), {});
        n_left = test_steps;
        return;
    }
    if (++tested < lengths.size()) {
        n_left = test_steps;
        return;
    }
    const auto best = std::max_element(trials.begin(), trials.end(), [](const trial & a, const trial & b) {
        return a.tokens * b.seconds < b.tokens * a.seconds;
    });
    chosen = static_cast<size_t>(best - trials.begin());
    patience = chosen == 0 ? std::min(2 * patience, patience_max) : 1;
    testing = false;
    n_left = set_steps * patience;
}

} // namespace s2moe

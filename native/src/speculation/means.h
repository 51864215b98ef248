// Decayed means that know whether they know anything.

#pragma once

namespace s2moe {

constexpr double average_share = 0.1; // of a new sample
constexpr double nearly_none = 1e-3;  // of a mean that is 0 while unknown

// `mean` < 0 or 0: nothing known yet.
inline void average(double & mean, double sample) {
    mean = mean <= 0 ? sample : mean + average_share * (sample - mean);
}

} // namespace s2moe

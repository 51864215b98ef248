// Which expert gives way: the one whose use, counted with exponential decay, is least.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace s2moe {

constexpr double prompt_weight = 8; // a prompt counts as much as so many decodes, spread over its tokens

// A decayed count of uses, f(t) = sum over uses u of weight(u) * 2^((time(u) - t) / half_life), kept as
// log2 f(t) + t / half_life, which does not change while time passes: scores of different age compare directly.
class usefulness {
  public:
    static constexpr double half_life = 16; // tokens; of 6 to 128 the least misses on chat text (docs/expert-cache.md)

    void add(double weight, int64_t now) {
        const double age = static_cast<double>(now) / half_life;
        key = age + std::log2(std::exp2(std::max(key - age, -200.0)) + weight);
    }

    // Larger is more useful.
    double score() const {
        return key;
    }

  private:
    double key = -std::numeric_limits<double>::infinity();
};

} // namespace s2moe

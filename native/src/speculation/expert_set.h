// A set of experts of a model, over all its layers.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace s2moe {

// Pairs (layer, expert) as bits, in layer order: 6 KiB for 48 layers of 1,024 experts. A set made by the default
// constructor is empty and of no model: it may be asked and joined like any other. Sets of two models do not mix:
// std::invalid_argument.
class expert_set {
  public:
    expert_set() = default;

    expert_set(int n_layers, int n_expert) : n_layer(n_layers), n_per_layer(n_expert) {
        if (n_layers < 0 || n_expert < 0) {
            throw std::invalid_argument("expert_set: negative number of layers or experts");
        }
        words.resize((static_cast<size_t>(n_layers) * n_expert + 63) / 64);
    }

    // std::out_of_range where the model has no such expert.
    void add(int layer, int expert) {
        if (!inside(layer, expert)) {
            throw std::out_of_range("expert_set: no expert " + std::to_string(expert) + " in layer " +
                                    std::to_string(layer));
        }
        const size_t bit = index(layer, expert);
        words[bit / 64] |= uint64_t{1} << (bit % 64);
    }

    bool has(int layer, int expert) const {
        if (!inside(layer, expert)) {
            return false;
        }
        const size_t bit = index(layer, expert);
        return (words[bit / 64] >> (bit % 64) & 1) != 0;
    }

    void clear() {
        words.assign(words.size(), 0);
    }

    void unite(const expert_set & other) {
        check_same_model(other);
        if (words.empty()) {
            *this = other;
            return;
        }
        for (size_t i = 0; i < other.words.size(); ++i) {
            words[i] |= other.words[i];
        }
    }

    int size() const {
        int n = 0;
        for (const uint64_t word : words) {
            n += std::popcount(word);
        }
        return n;
    }

    int n_layers() const {
        return n_layer;
    }

    int n_expert() const {
        return n_per_layer;
    }

    struct counts {
        int resident = 0;
        int missing = 0;
    };

    // How many members are not in `covered`, split by whether they are in `resident`.
    counts new_beyond(const expert_set & covered, const expert_set & resident) const {
        check_same_model(covered);
        check_same_model(resident);
        counts result;
        for (size_t i = 0; i < words.size(); ++i) {
            const uint64_t fresh = words[i] & ~covered.word(i);
            result.resident += std::popcount(fresh & resident.word(i));
            result.missing += std::popcount(fresh & ~resident.word(i));
        }
        return result;
    }

    // f(layer, expert) for each member that is not in `covered`, in layer order.
    template <typename F> void for_each_beyond(const expert_set & covered, F && f) const {
        check_same_model(covered);
        for (size_t i = 0; i < words.size(); ++i) {
            for (uint64_t fresh = words[i] & ~covered.word(i); fresh != 0; fresh &= fresh - 1) {
                const size_t bit = i * 64 + static_cast<size_t>(std::countr_zero(fresh));
                f(static_cast<int>(bit / n_per_layer), static_cast<int>(bit % n_per_layer));
            }
        }
    }

    bool operator==(const expert_set &) const = default;

  private:
    bool inside(int layer, int expert) const {
        return layer >= 0 && layer < n_layer && expert >= 0 && expert < n_per_layer;
    }

    size_t index(int layer, int expert) const {
        return static_cast<size_t>(layer) * n_per_layer + expert;
    }

    uint64_t word(size_t i) const {
        return i < words.size() ? words[i] : 0;
    }

    void check_same_model(const expert_set & other) const {
        if (!words.empty() && !other.words.empty() && (n_layer != other.n_layer || n_per_layer != other.n_per_layer)) {
            throw std::invalid_argument("expert_set: sets of two models");
        }
    }

    int n_layer = 0;
    int n_per_layer = 0;
    std::vector<uint64_t> words;
};

} // namespace s2moe

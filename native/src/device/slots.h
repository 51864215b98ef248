// Slots in a GPU's memory: how many there are for which layers, and which experts lie in them.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "experts/layout.h"
#include "experts/replacement.h"

namespace s2moe {

// Layers that share slots: their experts' matrices have the same types and shapes. Behind its slots every group has
// n_zeros() that hold zeros.
struct slot_group {
    std::vector<int> layers; // indices in expert_layout::layers
    uint64_t slot_bytes = 0; // of one expert
    int n_slots = 0;
    int n_experts = 0;           // of all those layers
    int n_experts_per_layer = 0; // of the largest
};

/*
 * As many slots as fit, beside those of zeros.
 *
 *   piece_bytes  a stack of matrices takes at most as much, where a group can be divided for that: some drivers have no
 *                larger pieces of memory
 *
 * Throws failure (S2MOE_ERROR_INVALID) when capacity_bytes is less than slot_floor_bytes().
 */
std::vector<slot_group> plan_slots(const expert_layout & layout, uint64_t capacity_bytes, uint64_t piece_bytes);

// As many as a token has experts: ggml's kernels want the ids of a token to differ.
inline int n_zeros(const expert_layout & layout) {
    return static_cast<int>(layout.n_expert_used);
}

// What one layer's experts of each shape take, with the slots of zeros.
uint64_t slot_floor_bytes(const expert_layout & layout);

// Which expert lies in which slot. Experts are entries: layer_index * n_expert + expert. Used under its owner's mutex.
class slot_map {
  public:
    slot_map(const expert_layout & layout, std::vector<slot_group> groups);

    int n_groups() const {
        return static_cast<int>(groups.size());
    }
    const slot_group & group(int i) const {
        return groups[i];
    }
    int group_of(int layer_index) const {
        return group_of_layer[layer_index];
    }
    int slot_of(int entry) const {
        return slots_of_entries[entry];
    }
    int n_resident() const {
        return n_used_slots;
    }

    // A layer is computed next: what claim() and place() name from now on stays until the next call.
    void begin_pass();
    void claim(int entry);

    // A slot for an expert that has none; -1 if none can be had. *evicted: the expert that gave way, or -1.
    int place(int entry, int * evicted);

    // While an expert is held it stays.
    void hold(int entry);
    void unhold(int entry);

    // These give way after all others, until the next call.
    void keep(std::span<const uint32_t> entries);

    void note_use(int entry, double weight, int64_t now) {
        uses[entry].add(weight, now);
    }

  private:
    struct slot {
        int owner = -1;
        bool in_pass = false;
        bool held = false;
    };

    slot & slot_at(int entry);

    const int n_expert;
    std::vector<slot_group> groups;
    std::vector<int> group_of_layer;
    std::vector<std::vector<slot>> slots; // by group
    std::vector<int> slots_of_entries;
    std::vector<usefulness> uses;
    std::vector<uint8_t> kept; // by entry
    std::vector<int> passing;  // entries in pass
    int n_used_slots = 0;
};

} // namespace s2moe

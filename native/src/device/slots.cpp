#include "device/slots.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "error.h"

namespace s2moe {

namespace {

uint64_t largest_part_bytes(const expert_layer & layer) {
    uint64_t n_bytes = 0;
    for (const expert_part & part : layer.parts) {
        n_bytes = std::max(n_bytes, part.bytes);
    }
    return n_bytes;
}

// Layers by the types and shapes of their matrices.
std::vector<slot_group> groups_by_shape(const expert_layout & layout) {
    using shape = std::vector<std::tuple<ggml_type, int64_t, int64_t>>;
    std::map<shape, int> known;
    std::vector<slot_group> groups;
    for (size_t i = 0; i < layout.layers.size(); ++i) {
        const expert_layer & layer = layout.layers[i];
        shape key;
        for (const expert_part & part : layer.parts) {
            key.emplace_back(part.type, part.ne[0], part.ne[1]);
        }
        const auto [found, is_new] = known.emplace(key, static_cast<int>(groups.size()));
        if (is_new) {
            groups.emplace_back();
            groups.back().slot_bytes = layer.expert_bytes();
        }
        slot_group & group = groups[found->second];
        group.layers.push_back(static_cast<int>(i));
        group.n_experts += layer.n_expert;
        group.n_experts_per_layer = std::max(group.n_experts_per_layer, layer.n_expert);
    }
    return groups;
}

uint64_t floor_bytes(const expert_layout & layout, const slot_group & group) {
    return group.slot_bytes * (group.n_experts_per_layer + n_zeros(layout));
}

// A group's layers in n_pieces groups, which share n_slots in proportion to their experts; empty if one of them would
// have less than a layer needs.
std::vector<slot_group> divided(const expert_layout & layout, const slot_group & group, int n_pieces, int n_slots) {
    const auto n_layers = static_cast<int>(group.layers.size());
    std::vector<slot_group> pieces;
    int n_experts_left = group.n_experts;
    for (int i = 0; i < n_pieces; ++i) {
        slot_group piece;
        piece.slot_bytes = group.slot_bytes;
        for (int j = i * n_layers / n_pieces; j < (i + 1) * n_layers / n_pieces; ++j) {
            const int n_expert = layout.layers[group.layers[j]].n_expert;
            piece.layers.push_back(group.layers[j]);
            piece.n_experts += n_expert;
            piece.n_experts_per_layer = std::max(piece.n_experts_per_layer, n_expert);
        }
        piece.n_slots = static_cast<int>(int64_t{n_slots} * piece.n_experts / n_experts_left);
        if (piece.layers.empty() || piece.n_slots < piece.n_experts_per_layer) {
            return {};
        }
        n_slots -= piece.n_slots;
        n_experts_left -= piece.n_experts;
        pieces.push_back(piece);
    }
    return pieces;
}

// In as few pieces as there must be for no stack to take more than piece_bytes; where no division does that, in as many
// as still have slots for a whole layer each. Each has slots of zeros, too: those of all but the first are paid from
// *spare_bytes, or come out of the slots.
std::vector<slot_group>
divide(const expert_layout & layout, const slot_group & group, uint64_t piece_bytes, uint64_t * spare_bytes) {
    const uint64_t matrix_bytes = largest_part_bytes(layout.layers[group.layers[0]]);
    const auto fits = [&](const slot_group & piece) {
        return matrix_bytes * (piece.n_slots + n_zeros(layout)) <= piece_bytes;
    };
    std::vector<slot_group> result = {group};
    uint64_t paid_bytes = 0;
    const auto n_most = static_cast<int>(group.layers.size());
    for (int n_pieces = 2; n_pieces <= n_most && !std::all_of(result.begin(), result.end(), fits); ++n_pieces) {
        const int n_more = n_zeros(layout) * (n_pieces - 1);
        const uint64_t zeros_bytes = group.slot_bytes * n_more;
        const bool pays = zeros_bytes <= *spare_bytes;
        auto pieces = divided(layout, group, n_pieces, group.n_slots - (pays ? 0 : n_more));
        if (!pieces.empty()) {
            result = std::move(pieces);
            paid_bytes = pays ? zeros_bytes : 0;
        }
    }
    *spare_bytes -= paid_bytes;
    return result;
}

} // namespace

uint64_t slot_floor_bytes(const expert_layout & layout) {
    uint64_t sum = 0;
    for (const slot_group & group : groups_by_shape(layout)) {
        sum += floor_bytes(layout, group);
    }
    return sum;
}

std::vector<slot_group> plan_slots(const expert_layout & layout, uint64_t capacity_bytes, uint64_t piece_bytes) {
    std::vector<slot_group> groups = groups_by_shape(layout);
    uint64_t floor = 0;
    uint64_t wanted = 0; // beyond the floor
    for (const slot_group & group : groups) {
        floor += floor_bytes(layout, group);
        wanted += group.slot_bytes * (group.n_experts - group.n_experts_per_layer);
    }
    if (capacity_bytes < floor) {
        throw failure(S2MOE_ERROR_INVALID,
                      "capacity_bytes of the GPU's slots is " + std::to_string(capacity_bytes) + ", at least " +
                          std::to_string(floor) + " are needed for the experts of one layer");
    }
    const double share =
        wanted == 0 ? 1 : std::min(1.0, static_cast<double>(capacity_bytes - floor) / static_cast<double>(wanted));
    uint64_t used = floor;
    for (slot_group & group : groups) {
        const int n_more = static_cast<int>(std::floor(share * (group.n_experts - group.n_experts_per_layer)));
        group.n_slots = group.n_experts_per_layer + n_more;
        used += group.slot_bytes * n_more;
    }
    for (slot_group & group : groups) { // what rounding left
        while (group.n_slots < group.n_experts && used + group.slot_bytes <= capacity_bytes) {
            ++group.n_slots;
            used += group.slot_bytes;
        }
    }
    std::vector<slot_group> result;
    uint64_t spare = capacity_bytes - used;
    for (const slot_group & group : groups) {
        const auto pieces = divide(layout, group, piece_bytes, &spare);
        result.insert(result.end(), pieces.begin(), pieces.end());
    }
    return result;
}

slot_map::slot_map(const expert_layout & layout, std::vector<slot_group> groups_in)
    : n_expert(static_cast<int>(layout.n_expert)), groups(std::move(groups_in)),
      group_of_layer(layout.layers.size(), -1), slots_of_entries(layout.layers.size() * n_expert, -1),
      uses(slots_of_entries.size()), kept(slots_of_entries.size()) {
    for (size_t i = 0; i < groups.size(); ++i) {
        slots.emplace_back(groups[i].n_slots);
        for (const int layer : groups[i].layers) {
            group_of_layer[layer] = static_cast<int>(i);
        }
    }
}

slot_map::slot & slot_map::slot_at(int entry) {
    return slots[group_of_layer[entry / n_expert]][slots_of_entries[entry]];
}

void slot_map::begin_pass() {
    for (const int entry : passing) {
        slot_at(entry).in_pass = false;
    }
    passing.clear();
}

void slot_map::claim(int entry) {
    slot_at(entry).in_pass = true;
    passing.push_back(entry);
}

int slot_map::place(int entry, int * evicted) {
    auto & candidates = slots[group_of_layer[entry / n_expert]];
    const auto rank = [&](const slot & candidate) {
        return std::make_pair(kept[candidate.owner], uses[candidate.owner].score());
    };
    *evicted = -1;
    int chosen = -1;
    for (size_t i = 0; i < candidates.size(); ++i) {
        const slot & candidate = candidates[i];
        if (candidate.owner < 0) {
            chosen = static_cast<int>(i);
            break;
        }
        if (candidate.in_pass || candidate.held) {
            continue;
        }
        if (chosen < 0 || rank(candidate) < rank(candidates[chosen])) {
            chosen = static_cast<int>(i);
        }
    }
    if (chosen < 0) {
        return -1;
    }
    slot & target = candidates[chosen];
    if (target.owner >= 0) {
        *evicted = target.owner;
        slots_of_entries[target.owner] = -1;
    } else {
        ++n_used_slots;
    }
    target = {.owner = entry};
    slots_of_entries[entry] = chosen;
    return chosen;
}

void slot_map::keep(std::span<const uint32_t> entries) {
    std::fill(kept.begin(), kept.end(), 0);
    for (const uint32_t entry : entries) {
        kept[entry] = 1;
    }
}

void slot_map::hold(int entry) {
    slot_at(entry).held = true;
}

void slot_map::unhold(int entry) {
    slot_at(entry).held = false;
}

} // namespace s2moe

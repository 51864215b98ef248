// How a GPU's memory becomes slots, and which experts give way in them.

#include <algorithm>
#include <cstdint>

#include "check.h"
#include "device/slots.h"
#include "error.h"

using namespace s2moe;

namespace {

constexpr int n_used = 2; // experts of a token, and so slots of zeros
constexpr int n_experts = 128;

struct shape {
    ggml_type type;
    int64_t n_values;
    int n_layers;
    int n_expert;
};

expert_layout layout_of(const std::vector<shape> & shapes) {
    expert_layout layout;
    layout.n_expert_used = n_used;
    for (const shape & each : shapes) {
        for (int i = 0; i < each.n_layers; ++i) {
            expert_layer layer;
            layer.layer = static_cast<int>(layout.layers.size()) + 1;
            layer.n_expert = each.n_expert;
            for (int part = 0; part < 3; ++part) {
                expert_part matrix;
                matrix.type = each.type;
                matrix.ne[0] = each.n_values;
                matrix.ne[1] = 8;
                matrix.bytes = 8 * ggml_row_size(each.type, each.n_values);
                layer.parts.push_back(matrix);
            }
            layout.layers.push_back(layer);
            layout.n_expert = std::max<int64_t>(layout.n_expert, each.n_expert);
        }
    }
    return layout;
}

uint64_t taken_bytes(const std::vector<slot_group> & groups) {
    uint64_t sum = 0;
    for (const slot_group & group : groups) {
        sum += group.slot_bytes * (group.n_slots + n_used);
    }
    return sum;
}

void test_plan() {
    const std::vector<std::vector<shape>> models = {{{GGML_TYPE_Q4_0, 64, 6, 16}},
                                                    {{GGML_TYPE_Q4_0, 64, 5, 16}, {GGML_TYPE_Q8_0, 64, 2, 16}},
                                                    {{GGML_TYPE_F32, 32, 1, 60}, {GGML_TYPE_F16, 96, 7, 8}}};
    for (const auto & shapes : models) {
        const expert_layout layout = layout_of(shapes);
        const uint64_t floor = slot_floor_bytes(layout);
        try {
            plan_slots(layout, floor - 1, UINT64_MAX / 2);
            CHECK(false);
        } catch (const failure & error) {
            CHECK(error.status == S2MOE_ERROR_INVALID);
        }
        for (const double share : {0.0, 0.1, 0.5, 0.9, 3.0}) {
            const auto capacity = floor + static_cast<uint64_t>(share * static_cast<double>(floor) * 6);
            for (const uint64_t piece : {UINT64_MAX / 2, uint64_t{200000}, uint64_t{20000}, uint64_t{1}}) {
                const auto groups = plan_slots(layout, capacity, piece);
                CHECK(taken_bytes(groups) <= capacity);
                std::vector<int> seen(layout.layers.size());
                for (const slot_group & group : groups) {
                    int n_experts = 0;
                    for (const int layer : group.layers) {
                        ++seen[layer];
                        n_experts += layout.layers[layer].n_expert;
                        CHECK(layout.layers[layer].parts[0].type == layout.layers[group.layers[0]].parts[0].type);
                    }
                    CHECK(n_experts == group.n_experts);
                    CHECK(group.n_slots >= group.n_experts_per_layer && group.n_slots <= n_experts);
                }
                CHECK(seen == std::vector<int>(seen.size(), 1)); // every layer has one group
                if (share == 3.0 && piece == UINT64_MAX / 2) {
                    for (const slot_group & group : groups) {
                        CHECK(group.n_slots == group.n_experts);
                    }
                }
            }
        }
    }
    const expert_layout layout = layout_of({{GGML_TYPE_Q4_0, 64, 6, 16}});
    const uint64_t matrix = 8 * ggml_row_size(GGML_TYPE_Q4_0, 64);
    const auto divided = plan_slots(layout, 1 << 20, 40 * matrix);
    CHECK(divided.size() == 3);
    for (const slot_group & group : divided) {
        CHECK((group.n_slots + n_used) * matrix <= 40 * matrix);
    }
}

// Slots of the largest part when so many equal layers are divided, or 0 if a part has too few for a layer.
int largest_part(int n_layers, int n_parts, int n_slots) {
    int largest = 0;
    int n_layers_left = n_layers;
    for (int i = 0; i < n_parts; ++i) {
        const int n = (i + 1) * n_layers / n_parts - i * n_layers / n_parts;
        const int share = n_slots * n / n_layers_left;
        if (share < n_experts) {
            return 0;
        }
        largest = std::max(largest, share);
        n_slots -= share;
        n_layers_left -= n;
    }
    return largest;
}

// However layers divide, no stack is larger than a piece where a division is there for that.
void test_size_of_stacks() {
    int n_fitting = 0;
    int n_rest = 0;
    for (const int n_layers : {5, 9, 36, 45}) {
        const expert_layout layout = layout_of({{GGML_TYPE_Q4_0, 64, n_layers, n_experts}});
        const uint64_t matrix = 8 * ggml_row_size(GGML_TYPE_Q4_0, 64);
        const uint64_t expert = layout.layers[0].expert_bytes();
        for (int n_slots = n_experts; n_slots <= n_experts * n_layers; n_slots += 50) {
            const int most = 2 * n_experts;
            const auto groups = plan_slots(layout, expert * (n_slots + n_used), (most + n_used) * matrix);
            const bool fits = std::all_of(
                groups.begin(), groups.end(), [&](const slot_group & each) { return each.n_slots <= most; });
            bool can_fit = n_slots <= most;
            for (int n_parts = 2; n_parts <= n_layers; ++n_parts) {
                const int largest = largest_part(n_layers, n_parts, n_slots - n_used * (n_parts - 1));
                can_fit = can_fit || (largest > 0 && largest <= most);
            }
            CHECK(fits == can_fit);
            n_fitting += fits && groups.size() > 1;
            n_rest += !fits;
        }
    }
    CHECK(n_fitting > 100 && n_rest > 3);
}

void test_map() {
    const expert_layout layout = layout_of({{GGML_TYPE_Q4_0, 64, 4, 8}});
    slot_map map(layout, plan_slots(layout, slot_floor_bytes(layout) + 2 * layout.layers[0].expert_bytes(), 1 << 30));
    const int n_slots = map.group(0).n_slots;
    CHECK(n_slots == 10 && map.n_groups() == 1);
    int evicted = 7;
    map.begin_pass();
    for (int entry = 0; entry < n_slots; ++entry) {
        CHECK(map.place(entry, &evicted) == entry && evicted == -1);
        map.note_use(entry, 1 + entry, 1);
    }
    CHECK(map.n_resident() == n_slots);
    CHECK(map.place(20, &evicted) == 0 && evicted == 0); // the least used
    CHECK(map.slot_of(0) == -1 && map.slot_of(20) == 0);
    map.note_use(20, 100, 1);
    map.claim(1); // of the layer that is computed
    map.hold(2);
    CHECK(map.place(21, &evicted) == 3 && evicted == 3);
    map.note_use(21, 100, 1);
    const uint32_t kept[] = {4, 5};
    map.keep(kept);
    CHECK(map.place(22, &evicted) == 6 && evicted == 6);
    map.note_use(22, 100, 1);
    map.begin_pass();
    CHECK(map.place(23, &evicted) == 1 && evicted == 1);
    map.note_use(23, 100, 1);
    map.unhold(2);
    CHECK(map.place(24, &evicted) == 2 && evicted == 2);
    map.note_use(24, 100, 1);
    for (int entry = 0; entry < 32; ++entry) {
        if (map.slot_of(entry) >= 0 && entry != 4 && entry != 5) {
            map.claim(entry);
        }
    }
    CHECK(map.place(25, &evicted) == 4 && evicted == 4); // all others must stay
    map.claim(25);
    CHECK(map.place(26, &evicted) == 5 && evicted == 5);
    map.claim(26);
    CHECK(map.place(27, &evicted) == -1 && evicted == -1);
    CHECK(map.slot_of(27) == -1 && map.n_resident() == n_slots);
    map.begin_pass();
    CHECK(map.place(27, &evicted) >= 0 && evicted >= 0);
}

} // namespace

int main() {
    test_plan();
    test_size_of_stacks();
    test_map();
    return 0;
}

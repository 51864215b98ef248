// The tier's memory: its stacks of slots, what it shares with the kernels, and the cache's, which the device reads.

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "device/tier.h"
#include "error.h"

namespace s2moe {

void device_tier::leave_cache() {
    cache.join(nullptr);
    for (const area & each : areas) {
        device->unpin(each.host);
    }
}

// One buffer for each stack: many drivers have no single piece of memory for all.
void device_tier::make_stacks() {
    const int n_tensors_max = slots.n_groups() * max_slot_parts;
    tensors.reset(ggml_init({ggml_tensor_overhead() * n_tensors_max, nullptr, true}));
    for (int g = 0; g < slots.n_groups(); ++g) {
        const slot_group & group = slots.group(g);
        auto & stack = stacks.emplace_back();
        for (const expert_part & part : cache.layout.layers[group.layers[0]].parts) {
            ggml_tensor * tensor = ggml_new_tensor_3d(
                tensors.get(), part.type, part.ne[0], part.ne[1], group.n_slots + n_zeros(cache.layout));
            ggml_backend_buffer_type_t type = device->slot_buffer_type();
            const size_t n_bytes = ggml_backend_buft_get_alloc_size(type, tensor);
            ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(type, n_bytes);
            if (buffer == nullptr) {
                throw failure(S2MOE_ERROR_NO_MEMORY,
                              std::string(device->name()) + " has no " + std::to_string(n_bytes) +
                                  " bytes for expert slots");
            }
            buffers.emplace_back(buffer);
            ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            ggml_backend_buffer_clear(buffer, 0);
            if (ggml_backend_tensor_alloc(buffer, tensor, ggml_backend_buffer_get_base(buffer)) !=
                GGML_STATUS_SUCCESS) {
                throw failure(S2MOE_ERROR_INTERNAL, "a stack of expert slots does not fit its buffer");
            }
            stack.push_back(tensor);
        }
        totals.capacity_experts += group.n_slots;
        totals.capacity_bytes += group.n_slots * group.slot_bytes;
    }
    layers.resize(cache.layout.layers.size());
    for (size_t i = 0; i < layers.size(); ++i) {
        layers[i] = {.owner = this, .index = static_cast<int32_t>(i), .n_matrices = 0, .matrices = {}};
        for (ggml_tensor * stack : stacks[slots.group_of(static_cast<int>(i))]) {
            layers[i].matrices[layers[i].n_matrices++].slots = stack;
        }
    }
}

void device_tier::share_memory() {
    const size_t table_bytes = states.size() * sizeof(int32_t);
    const size_t image_bytes =
        (sizeof(remap_control) + table_bytes + alignof(slot_fetch) - 1) / alignof(slot_fetch) * alignof(slot_fetch);
    image.resize(sizeof(remap_control) + table_bytes);
    const remap_control control;
    std::memcpy(image.data(), &control, sizeof(control));
    std::memset(image.data() + sizeof(control), 0xFF, table_bytes); // -1: no slot
    const size_t fetch_bytes = max_fetches * sizeof(slot_fetch);
    kernel_memory = device->allocate(image_bytes + fetch_bytes + sizeof(remap_timer));
    shared = device->allocate_shared(sizeof(remap_mailbox) + table_bytes);
    state.n_layer = static_cast<int32_t>(layers.size());
    state.n_expert = n_expert;
    state.control = reinterpret_cast<remap_control *>(kernel_memory.get());
    state.table = reinterpret_cast<int32_t *>(kernel_memory.get() + sizeof(control));
    state.fetches = reinterpret_cast<slot_fetch *>(kernel_memory.get() + image_bytes);
    state.timer = reinterpret_cast<remap_timer *>(kernel_memory.get() + image_bytes + fetch_bytes);
    static_assert(alignof(slot_fetch) >= alignof(remap_timer));
    state.mailbox = new (shared.get()) remap_mailbox;
    state.n_rows = reinterpret_cast<int32_t *>(shared.get() + sizeof(remap_mailbox));
}

// In pieces, as far as it goes: systems limit what may be pinned.
void device_tier::pin_cache() {
    for (const slot_area & each : cache.areas()) {
        // no expert lies in two pieces
        const uint64_t n_slots = std::max<uint64_t>(1, device->piece_bytes() / each.slot_bytes);
        for (uint64_t first = 0; first < each.bytes.size() && unpinned_reason.empty();
             first += n_slots * each.slot_bytes) {
            const auto piece =
                each.bytes.subspan(first, std::min(n_slots * each.slot_bytes, each.bytes.size() - first));
            const std::byte * address = device->pin(piece, &unpinned_reason);
            if (address != nullptr) {
                areas.push_back({piece, address});
                totals.pinned_bytes += piece.size();
            }
        }
    }
    if (!unpinned_reason.empty()) {
        for (const slot_class & each : cache.layout.classes) {
            staging_bytes = std::max(staging_bytes, each.slot_bytes * each.n_experts_per_layer);
        }
        staging = device->allocate_shared(staging_bytes);
    }
}

void device_tier::attach(llama_context * ctx) {
    for (llama_moe_slot_layer & layer : layers) {
        for (int part = 0; part < layer.n_matrices; ++part) {
            layer.matrices[part].experts = cache.tensor(layer.index, part);
            if (layer.matrices[part].experts == nullptr) {
                throw failure(S2MOE_ERROR_INVALID, "the model of this expert cache is not loaded");
            }
        }
    }
    try {
        llama_moe_set_slots(ctx, device->remap(), layers.data(), static_cast<int32_t>(layers.size()));
    } catch (...) {
        llama_moe_set_slots(ctx, nullptr, nullptr, 0);
        throw;
    }
}

} // namespace s2moe

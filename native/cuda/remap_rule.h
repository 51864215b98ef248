// From experts' ids to the slots they lie in, for the lanes of lanes.h: what the kernels of remap.cu do in one layer.
//
// The table of what lies where belongs to the kernel's side. While every expert of a layer has a slot, nothing else is
// touched. Otherwise the kernel leaves a request in the mailbox and waits: the host answers with changes to the table
// and with what must be copied into slots before the layer is computed.

#pragma once

#include <cstddef>
#include <cstdint>

#include "lanes.h"

namespace s2moe {

constexpr int max_remap_experts = 512;
constexpr int max_slot_parts = 4;
constexpr int max_fetches = max_slot_parts * max_remap_experts;
constexpr int max_flights = max_remap_experts; // experts on their way into slots
constexpr int max_changes = 2 * max_remap_experts + max_flights;

// Of the table: layer and expert lie in `slot` from now on; negative: in none.
struct slot_change {
    int32_t layer = 0;
    int32_t expert = 0;
    int32_t slot = -1;
};

struct slot_fetch {
    const std::byte * from = nullptr; // as the kernel's side reaches it
    std::byte * to = nullptr;
    uint64_t n_bytes = 0;
};

// In memory that both sides reach. The kernel writes all up to `request`, then that; the host answers likewise.
struct remap_mailbox {
    int32_t layer = 0; // index in the table
    int32_t n_tokens = 0;
    int32_t n_unknown = 0;                  // ids that name no expert
    int32_t n_rows[max_remap_experts] = {}; // by expert: rows of this batch that use it
    uint64_t copy_nanoseconds = 0;          // that the last fetches took
    uint32_t request = 0;                   // grows by one

    int32_t n_changes = 0;
    int32_t n_fetches = 0;
    slot_change changes[max_changes]; // at most one of an expert
    slot_fetch fetches[max_fetches];
    uint32_t answer = 0; // the last request that has been answered
};

// What changes between decodes, but only while no kernel runs.
struct remap_control {
    uint32_t n_requests = 0; // so far; the kernel counts on
    int32_t n_fetches = 0;   // of the layer that is being computed
    bool drafting = false;   // nothing is waited for: what has no slot counts as zero
};

// From the first byte of the last fetches to their last one, in nanoseconds of the clock of who copies.
struct remap_timer {
    uint64_t begin = UINT64_MAX;
    uint64_t end = 0;
};

// All of the kernel's side.
struct remap_state {
    int32_t n_layer = 0;
    int32_t n_expert = 0; // columns of the table
    remap_control * control = nullptr;
    int32_t * table = nullptr;      // [n_layer][n_expert] slots; negative: none
    slot_fetch * fetches = nullptr; // [max_fetches] of the layer that is being computed
    remap_timer * timer = nullptr;
    int32_t * n_rows = nullptr; // [n_layer][n_expert] in memory that both reach: uses of the last batch
    remap_mailbox * mailbox = nullptr;
};

// One layer of a graph.
struct remap_call {
    int32_t layer = 0;
    int32_t n_expert = 0; // of this layer
    int32_t n_ids = 0;    // experts per token
    int32_t n_tokens = 0;
    int32_t zero_slot = 0;           // the first of n_ids that hold matrices of zeros
    const std::byte * ids = nullptr; // I32 [n_tokens][n_ids]
    size_t id_stride = 0;
    size_t token_stride = 0;
    int32_t * slots = nullptr; // [n_tokens][n_ids], receives

    S2MOE_ANYWHERE int32_t id(int token, int i) const {
        return *reinterpret_cast<const int32_t *>(ids + token * token_stride + i * id_stride);
    }
};

// Shared by the lanes.
struct remap_memory {
    int32_t n_rows[max_remap_experts];
    int32_t n_unknown;
};

template <typename lanes_type>
S2MOE_ANYWHERE void
remap_layer(lanes_type & lanes, const remap_state & state, const remap_call & call, remap_memory & memory) {
    const int n = call.n_ids * call.n_tokens;
    int32_t * table = state.table + static_cast<ptrdiff_t>(call.layer) * state.n_expert;
    int32_t * used = state.n_rows + static_cast<ptrdiff_t>(call.layer) * state.n_expert;
    lanes.at(0, [&] {
        memory.n_unknown = 0;
        state.control->n_fetches = 0;
    });
    lanes.each(call.n_expert, [&](int e) { memory.n_rows[e] = 0; });
    lanes.each(n, [&](int i) {
        const int32_t id = call.id(i / call.n_ids, i % call.n_ids);
        const bool known = id >= 0 && id < call.n_expert;
        lanes.add(known ? &memory.n_rows[id] : &memory.n_unknown, 1);
    });
    lanes.each(call.n_expert, [&](int e) {
        if (memory.n_rows[e] > 0) {
            used[e] = memory.n_rows[e];
        }
    });
    const int missing =
        lanes.best(call.n_expert, [&](int e) { return static_cast<uint64_t>(memory.n_rows[e] > 0 && table[e] < 0); });
    if ((missing >= 0 && !state.control->drafting) || memory.n_unknown > 0) {
        remap_mailbox & mailbox = *state.mailbox;
        lanes.each(call.n_expert, [&](int e) { mailbox.n_rows[e] = memory.n_rows[e]; });
        lanes.at(0, [&] {
            mailbox.layer = call.layer;
            mailbox.n_tokens = call.n_tokens;
            mailbox.n_unknown = memory.n_unknown;
            mailbox.copy_nanoseconds =
                state.timer->end > state.timer->begin ? state.timer->end - state.timer->begin : 0;
            *state.timer = remap_timer();
            const uint32_t request = ++state.control->n_requests;
            lanes.publish(&mailbox.request, request);
            lanes.wait(&mailbox.answer, request);
            state.control->n_fetches = mailbox.n_fetches;
        });
        lanes.meet();
        lanes.each(mailbox.n_changes, [&](int i) {
            const slot_change change = mailbox.changes[i];
            state.table[static_cast<ptrdiff_t>(change.layer) * state.n_expert + change.expert] = change.slot;
        });
        lanes.each(state.control->n_fetches, [&](int i) { state.fetches[i] = mailbox.fetches[i]; });
    }
    lanes.each(n, [&](int i) {
        const int32_t id = call.id(i / call.n_ids, i % call.n_ids);
        const bool known = id >= 0 && id < call.n_expert;
        // of one token no two are the same, as ggml's kernels want it
        call.slots[i] = known && table[id] >= 0 ? table[id] : call.zero_slot + i % call.n_ids;
    });
}

template <typename unit>
S2MOE_ANYWHERE void
copy_units(std::byte * to, const std::byte * from, uint64_t n_bytes, uint64_t i, uint64_t n_threads) {
    auto * target = reinterpret_cast<unit *>(to);
    const auto * source = reinterpret_cast<const unit *>(from);
    for (; i < n_bytes / sizeof(unit); i += n_threads) {
        target[i] = source[i];
    }
}

struct alignas(16) copy_unit {
    uint64_t half[2];
};

// Thread i of n_threads copies its part of what the last answer named. Matrices begin where the file has them, so
// source and target may suit narrow units only.
S2MOE_ANYWHERE inline void fetch_slots(const remap_state & state, uint64_t i, uint64_t n_threads) {
    for (int f = 0; f < state.control->n_fetches; ++f) {
        const slot_fetch fetch = state.fetches[f];
        const uint64_t ends =
            reinterpret_cast<uintptr_t>(fetch.from) | reinterpret_cast<uintptr_t>(fetch.to) | fetch.n_bytes;
        if (ends % sizeof(copy_unit) == 0) {
            copy_units<copy_unit>(fetch.to, fetch.from, fetch.n_bytes, i, n_threads);
        } else if (ends % sizeof(uint32_t) == 0) {
            copy_units<uint32_t>(fetch.to, fetch.from, fetch.n_bytes, i, n_threads);
        } else {
            copy_units<uint8_t>(fetch.to, fetch.from, fetch.n_bytes, i, n_threads);
        }
    }
}

} // namespace s2moe

#include "device/tier.h"

#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "error.h"
#include "json.h"

namespace s2moe {

namespace {

// After a request the next one is looked for without a pause, for longer where a core can be spared.
constexpr auto eager_time = std::chrono::microseconds(1500);
constexpr auto eager_time_of_few_cores = std::chrono::microseconds(100);
constexpr unsigned few_cores = 4;
constexpr auto stuck_time = std::chrono::seconds(10);
constexpr auto poll_time = std::chrono::microseconds(20);

template <typename value> value load(const value & word) {
    return std::atomic_ref<value>(const_cast<value &>(word)).load(std::memory_order_acquire);
}

} // namespace

device_tier::device_tier(expert_cache & cache_in, std::unique_ptr<device_memory> device_in, uint64_t capacity_bytes)
    : cache(cache_in), device(std::move(device_in)), n_expert(cache.n_expert_max()),
      slots(cache.layout, plan_slots(cache.layout, capacity_bytes, device->piece_bytes())),
      states(cache.layout.layers.size() * n_expert), lookups(states.size()) {
    if (n_expert > max_remap_experts) {
        throw failure(S2MOE_ERROR_UNSUPPORTED,
                      "the model has " + std::to_string(n_expert) +
                          " experts in a layer; slots on a GPU are for up to " + std::to_string(max_remap_experts));
    }
    make_stacks();
    share_memory();
    cache.join(this);
    try {
        pin_cache();
        n_synchronizations_seen = device->n_synchronizations();
        server = std::thread([this] { serve(); });
    } catch (...) {
        leave_cache();
        throw;
    }
}

device_tier::~device_tier() {
    {
        const std::lock_guard lock(mutex);
        stopping = true;
    }
    woken.notify_all();
    server.join();
    for (const flight & each : flights) {
        try {
            wait_for(each.mark);
        } catch (const failure &) {
            break; // the device is lost, and its memory with it
        }
        cache.unhold(each.entry);
    }
    device->finish_copies();
    leave_cache();
}

std::string device_tier::to_json() const {
    const common_json result = {{"device", device->name()},
                                {"unified", device->is_unified()},
                                {"watchdog", device->has_watchdog()},
                                {"pinned", unpinned_reason.empty()},
                                {"reason", unpinned_reason}};
    return result.dump();
}

remap_call device_tier::call_of(const ggml_tensor * op, const llama_moe_slot_layer & layer) const {
    const ggml_tensor * ids = op->src[0];
    remap_call call;
    call.layer = layer.index;
    call.n_expert = cache.layout.layers[layer.index].n_expert;
    call.n_ids = static_cast<int32_t>(ids->ne[0]);
    call.n_tokens = static_cast<int32_t>(ids->ne[1]);
    call.zero_slot = slots.group(slots.group_of(layer.index)).n_slots;
    call.ids = static_cast<const std::byte *>(ids->data);
    call.id_stride = ids->nb[0];
    call.token_stride = ids->nb[1];
    call.slots = static_cast<int32_t *>(op->data);
    return call;
}

// ── decodes ──────────────────────────────────────────────────────────────────────────────────────

void device_tier::begin_decode(decode_kind next) {
    const std::lock_guard lock(mutex);
    kind = next;
    land();
    remap_control control;
    std::memcpy(&control, image.data(), sizeof(control));
    const bool drafting = kind == decode_kind::draft;
    if (is_stale || control.drafting != drafting) {
        const size_t n_bytes = is_stale ? image.size() : sizeof(control);
        control.n_requests = n_answered;
        control.drafting = drafting;
        std::memcpy(image.data(), &control, sizeof(control));
        is_stale = true; // until that has worked
        upload(n_bytes);
    }
    n_tokens_asked = 0;
    std::fill_n(state.n_rows, states.size(), 0);
    std::fill(lookups.begin(), lookups.end(), lookup::hit);
    running.store(true, std::memory_order_release);
    woken.notify_all();
}

void device_tier::upload(size_t n_bytes) {
    device->write(kernel_memory.get(), image.data(), n_bytes);
    is_stale = false;
    ++n_uploads;
}

void device_tier::end_decode() {
    running.store(false, std::memory_order_release);
    const std::lock_guard lock(mutex);
    slots.begin_pass();
    // also those between the last decode and this one, which are of the same step
    const uint64_t n_seen = std::exchange(n_synchronizations_seen, device->n_synchronizations());
    const uint64_t n_waits = n_synchronizations_seen - n_seen + std::exchange(n_uploads, 0);
    if (kind == decode_kind::draft) {
        totals.synchronizations[S2MOE_PHASE_DECODE] += n_waits;
        return; // the target has not chosen these
    }
    int n_tokens = 0;
    for (size_t layer = 0; layer < layers.size(); ++layer) {
        int n_ids = 0;
        for (int e = 0; e < n_expert; ++e) {
            n_ids += state.n_rows[layer * n_expert + e];
        }
        n_tokens = std::max(n_tokens, n_ids / static_cast<int>(cache.layout.n_expert_used));
    }
    const bool prompt = is_prompt(kind, n_tokens);
    const auto phase = prompt ? S2MOE_PHASE_PREFILL : S2MOE_PHASE_DECODE;
    totals.synchronizations[phase] += n_waits;
    n_tokens_seen += prompt ? 1 : n_tokens;
    for (uint32_t entry = 0; entry < states.size(); ++entry) {
        const int32_t n_rows = state.n_rows[entry];
        if (n_rows == 0 || lookups[entry] == lookup::missed) {
            continue; // the cache and fetch_missing() have counted those
        }
        totals.hits[phase] += lookups[entry] == lookup::hit;
        slots.note_use(static_cast<int>(entry), prompt ? prompt_weight * n_rows / n_tokens : n_rows, n_tokens_seen);
        if (!prompt) {
            cache.note_uses(entry, n_rows);
        }
    }
}

void device_tier::note_synchronization() {
    const std::lock_guard lock(mutex);
    ++totals.synchronizations[S2MOE_PHASE_DECODE];
}

void device_tier::stats(s2moe_device_stats & result) const {
    const std::lock_guard lock(mutex);
    result = totals;
    result.resident_experts = slots.n_resident() - flights.size();
}

// ── requests of a kernel that waits ──────────────────────────────────────────────────────────────

void device_tier::serve() {
    prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); // else the kernel adds 50 µs to each pause
    const auto eager = std::thread::hardware_concurrency() < few_cores ? eager_time_of_few_cores : eager_time;
    auto last = steady::now();
    std::unique_lock lock(mutex);
    while (true) {
        woken.wait(lock, [&] { return running.load(std::memory_order_acquire) || stopping; });
        if (stopping) {
            return;
        }
        if (const uint32_t request = load(state.mailbox->request); request != n_answered) {
            answer(request);
            last = steady::now();
            continue;
        }
        lock.unlock();
        if (steady::now() - last < eager) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(poll_time);
        }
        lock.lock();
    }
}

// Whatever happens, the kernel gets its answer: an expert without a slot counts as zero, and the decode fails.
void device_tier::answer(uint32_t request) {
    const auto begun = steady::now();
    remap_mailbox & mailbox = *state.mailbox;
    mailbox.n_changes = mailbox.n_fetches = 0;
    n_staged = 0;
    totals.copy_seconds[copy_phase] += 1e-9 * static_cast<double>(mailbox.copy_nanoseconds);
    // of the whole decode: the last layer of a prompt often computes its last token only
    n_tokens_asked = std::max(n_tokens_asked, mailbox.n_tokens);
    if (mailbox.n_unknown > 0) {
        cache.fail(S2MOE_ERROR_NUMERIC,
                   "the router of layer " + std::to_string(cache.layout.layers[mailbox.layer].layer) +
                       " chose an expert that does not exist; the model's weights are damaged");
    } else {
        try {
            fetch_layer();
        } catch (const failure & error) {
            cache.fail(error.status, error.what());
        } catch (const std::exception & error) {
            cache.fail(S2MOE_ERROR_INTERNAL, error.what());
        }
    }
    tell_changes();
    const auto phase = phase_of(kind, n_tokens_asked);
    if (mailbox.n_fetches > 0) {
        copy_phase = phase;
    }
    ++totals.requests[phase];
    totals.wait_seconds[phase] += std::chrono::duration<double>(steady::now() - begun).count();
    n_answered = request;
    std::atomic_ref<uint32_t>(mailbox.answer).store(request, std::memory_order_release);
}

void device_tier::fetch_layer() {
    const remap_mailbox & mailbox = *state.mailbox;
    const auto phase = phase_of(kind, n_tokens_asked);
    std::vector<int32_t> missing(n_expert);
    bool any = false;
    slots.begin_pass();
    // all that is there is claimed before anything gives way
    for (int e = 0; e < cache.layout.layers[mailbox.layer].n_expert; ++e) {
        const auto entry = static_cast<uint32_t>(mailbox.layer * n_expert + e);
        if (mailbox.n_rows[e] == 0) {
            continue;
        }
        const bool has_slot = slots.slot_of(static_cast<int>(entry)) >= 0;
        if (has_slot) {
            slots.claim(static_cast<int>(entry));
        }
        if (states[entry] == S2MOE_ABSENT) { // with a slot, too, where a copy beside the computation failed
            missing[e] = mailbox.n_rows[e];
            any = true;
            continue;
        }
        if (states[entry] == S2MOE_IN_FLIGHT) {
            await_flight(entry);
            change(entry);
            lookups[entry] = lookup::prefetched;
            ++totals.prefetched[phase];
        }
    }
    if (any) {
        land_all(); // what is on its way holds slots, of the device and of the cache, that this layer may need
        fetch_missing(mailbox.layer, missing);
    }
}

void device_tier::fetch_missing(int layer, std::span<const int32_t> n_rows) {
    remap_mailbox & mailbox = *state.mailbox;
    const bool prompt = is_prompt(kind, n_tokens_asked);
    const auto phase = prompt ? S2MOE_PHASE_PREFILL : S2MOE_PHASE_DECODE;
    const auto n_parts = static_cast<int>(cache.layout.layers[layer].parts.size());
    std::vector<std::array<const std::byte *, max_slot_parts>> data(n_expert);
    for (int part = 0; part < n_parts; ++part) {
        cache.begin_op(layer, part, n_rows, mailbox.n_tokens);
        for (int i = 0; i < cache.n_op_experts(); ++i) {
            const op_expert expert = cache.wait_expert(i);
            data[expert.expert][part] = expert.data;
        }
        cache.end_op();
    }
    if (cache.failed()) {
        return;
    }
    for (int e = 0; e < n_expert; ++e) {
        if (n_rows[e] == 0) {
            continue;
        }
        const auto entry = static_cast<uint32_t>(layer * n_expert + e);
        slots.note_use(
            static_cast<int>(entry), prompt ? prompt_weight * n_rows[e] / n_tokens_asked : n_rows[e], n_tokens_seen);
        if (slots.slot_of(static_cast<int>(entry)) < 0 && !place(entry)) {
            throw failure(S2MOE_ERROR_INTERNAL, "the GPU has fewer expert slots than this batch needs");
        }
        states[entry].store(S2MOE_RESIDENT, std::memory_order_relaxed);
        change(entry);
        for (int part = 0; part < n_parts; ++part) {
            const uint64_t n_bytes = layer_of(entry).parts[part].bytes;
            mailbox.fetches[mailbox.n_fetches++] = {
                reachable(data[e][part], n_bytes), slot_address(entry, part), n_bytes};
            totals.demand_bytes[phase] += n_bytes;
        }
        lookups[entry] = lookup::missed;
        ++totals.misses[phase];
    }
}

// Where the device reads what lies at `data` in the cache's memory.
const std::byte * device_tier::reachable(const std::byte * data, uint64_t n_bytes) {
    for (const area & each : areas) {
        if (data >= each.host.data() && data < each.host.data() + each.host.size()) {
            return each.device + (data - each.host.data());
        }
    }
    std::byte * copy = staging.get() + n_staged;
    std::memcpy(copy, data, n_bytes);
    n_staged += (n_bytes + 15) / 16 * 16;
    return copy;
}

// ── slots ────────────────────────────────────────────────────────────────────────────────────────

std::byte * device_tier::slot_address(uint32_t entry, int part) const {
    const ggml_tensor * stack = stacks[slots.group_of(static_cast<int>(entry) / n_expert)][part];
    return static_cast<std::byte *>(stack->data) + slots.slot_of(static_cast<int>(entry)) * stack->nb[2];
}

// Gives the expert a slot that stays until the pass ends; who lay there is told to the kernel.
bool device_tier::place(uint32_t entry) {
    int evicted = -1;
    if (slots.place(static_cast<int>(entry), &evicted) < 0) {
        return false;
    }
    slots.claim(static_cast<int>(entry));
    if (evicted >= 0) {
        states[evicted].store(S2MOE_ABSENT, std::memory_order_relaxed);
        ++totals.evictions;
        totals.resident_bytes -= layer_of(evicted).expert_bytes();
        change(static_cast<uint32_t>(evicted));
    }
    totals.resident_bytes += layer_of(entry).expert_bytes();
    return true;
}

// Puts where the expert lies into the table, and into the answer if a kernel waits.
void device_tier::change(uint32_t entry) {
    const int32_t slot =
        states[entry].load(std::memory_order_relaxed) == S2MOE_RESIDENT ? slots.slot_of(static_cast<int>(entry)) : -1;
    std::memcpy(image.data() + sizeof(remap_control) + entry * sizeof(slot), &slot, sizeof(slot));
    if (running.load(std::memory_order_relaxed)) {
        changed.push_back(entry);
    } else {
        is_stale = true;
    }
}

// Of an expert that left and came back the last place counts: the kernel's lanes take the changes in any order.
void device_tier::tell_changes() {
    remap_mailbox & mailbox = *state.mailbox;
    std::sort(changed.begin(), changed.end());
    changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
    for (const uint32_t entry : changed) {
        int32_t slot = -1;
        std::memcpy(&slot, image.data() + sizeof(remap_control) + entry * sizeof(slot), sizeof(slot));
        mailbox.changes[mailbox.n_changes++] = {
            static_cast<int32_t>(entry) / n_expert, static_cast<int32_t>(entry) % n_expert, slot};
    }
    changed.clear();
}

// ── copies beside the computation ────────────────────────────────────────────────────────────────

void device_tier::promote(std::span<const uint32_t> entries) {
    const std::lock_guard lock(mutex);
    if (running.load(std::memory_order_relaxed)) {
        return;
    }
    land();
    slots.begin_pass();
    for (const uint32_t entry : entries) {
        if (slots.slot_of(static_cast<int>(entry)) >= 0) {
            slots.claim(static_cast<int>(entry));
        }
    }
    for (const uint32_t entry : entries) {
        std::array<std::byte *, max_slot_parts> parts = {};
        if (flights.size() >= max_flights) {
            break;
        }
        if (slots.slot_of(static_cast<int>(entry)) >= 0 || !cache.hold(entry, parts)) {
            continue;
        }
        if (!place(entry)) {
            cache.unhold(entry);
            continue;
        }
        launch(entry, parts);
    }
}

void device_tier::launch(uint32_t entry, std::span<std::byte * const> parts) {
    try {
        for (size_t part = 0; part < layer_of(entry).parts.size(); ++part) {
            const uint64_t n_bytes = layer_of(entry).parts[part].bytes;
            device->copy(slot_address(entry, static_cast<int>(part)), parts[part], n_bytes);
            totals.promoted_bytes += n_bytes;
        }
        flights.push_back({entry, device->mark()});
        ++totals.promotions;
    } catch (...) {
        device->finish_copies(); // of its parts; no kernel waits
        cache.unhold(entry);     // it keeps its slot, into which it is fetched when it is needed
        throw;
    }
    states[entry].store(S2MOE_IN_FLIGHT, std::memory_order_relaxed);
    slots.hold(static_cast<int>(entry));
}

// Takes note of copies that are complete. Their experts are in the table from the next upload or answer on.
void device_tier::land() {
    std::erase_if(flights, [&](const flight & each) {
        if (!device->passed(each.mark)) {
            return false;
        }
        touch_down(each);
        change(each.entry);
        return true;
    });
}

void device_tier::touch_down(const flight & landed) {
    states[landed.entry].store(S2MOE_RESIDENT, std::memory_order_relaxed);
    slots.unhold(static_cast<int>(landed.entry));
    cache.unhold(landed.entry);
}

void device_tier::land_all() {
    while (!flights.empty()) {
        const uint32_t entry = flights.back().entry;
        await_flight(entry);
        change(entry);
    }
}

// Throws failure when the device does not go on.
void device_tier::wait_for(uint64_t mark) {
    const auto begun = steady::now();
    while (!device->passed(mark)) {
        if (steady::now() - begun > stuck_time) {
            throw failure(S2MOE_ERROR_INTERNAL, std::string(device->name()) + " does not finish its copies");
        }
        std::this_thread::sleep_for(poll_time);
    }
}

void device_tier::await_flight(uint32_t entry) {
    const auto found =
        std::find_if(flights.begin(), flights.end(), [&](const flight & each) { return each.entry == entry; });
    wait_for(found->mark);
    touch_down(*found);
    flights.erase(found);
}

void device_tier::keep(std::span<const uint32_t> entries) {
    const std::lock_guard lock(mutex);
    slots.keep(entries);
}

} // namespace s2moe

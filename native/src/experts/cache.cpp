#include "cache.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "error.h"
#include "json.h"
#include "measure.h"
#include "speculation/gate_device.h"

namespace s2moe {

using steady = std::chrono::steady_clock;

namespace {

constexpr int prefetches_max = 4; // reads in flight, so that a demand does not wait long
constexpr int warmups_max = 2;
constexpr int64_t prefetch_decodes = 2;  // that a prefetched expert outlives without use
constexpr double warm_weight = 8;        // so do the counts of earlier runs
constexpr double average_share = 0.1;    // of a new sample in a moving average
constexpr double read_ahead_share = 0.6; // of a layer's experts that a batch must use to read the next one ahead
constexpr uint64_t sample_bytes = 256 * 1024;
constexpr auto population_time = std::chrono::seconds(2); // that allocate() waits
constexpr auto sample_time = std::chrono::milliseconds(50);

double seconds(steady::duration duration) {
    return std::chrono::duration<double>(duration).count();
}

int64_t monotonic_ns(steady::time_point time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

void average(double & value, double sample) {
    value = value == 0 ? sample : value + average_share * (sample - value);
}

} // namespace

expert_cache::expert_cache(expert_layout layout_in, const cache_options & options)
    : layout(std::move(layout_in)), queue_depth(options.queue_depth), is_static(options.policy == "static"),
      files(layout.files, options.io) {
    n_expert = static_cast<int>(layout.n_expert);
    entries.resize(layout.layers.size() * n_expert);
    op.experts.reserve(n_expert);
    op.waiting.reserve(n_expert);
    pools.resize(layout.classes.size());
    reader = expert_reader::create(options.reader, queue_depth, files, *this, &reader_reason);
}

expert_cache::~expert_cache() {
    {
        std::unique_lock lock(mutex);
        drain(lock);
    }
    reader.reset();
    stop_population();
    free_pools();
}

// ── memory ───────────────────────────────────────────────────────────────────────────────────────

uint64_t expert_cache::floor_bytes() const {
    uint64_t sum = 0;
    for (const slot_class & each : layout.classes) {
        sum += each.slot_bytes * each.n_experts_per_layer;
    }
    return sum;
}

void expert_cache::allocate(uint64_t capacity_bytes) {
    const uint64_t floor = floor_bytes();
    if (capacity_bytes < floor) {
        throw failure(S2MOE_ERROR_INVALID,
                      "capacity_bytes is " + std::to_string(capacity_bytes) + ", at least " + std::to_string(floor) +
                          " are needed for the experts of one layer");
    }
    if (upper != nullptr) {
        throw failure(S2MOE_ERROR_INVALID, "the expert cache feeds a GPU's slots; its capacity cannot change");
    }
    stop_population();
    std::unique_lock lock(mutex);
    drain(lock);
    close_op();
    end_pass();
    for (entry & each : entries) {
        each.slot = no_slot;
        each.prefetched = false;
        each.hot = false;
    }
    free_pools();

    // every class gets its floor, and the same share of what its experts need beyond that
    uint64_t wanted = 0;
    for (const slot_class & each : layout.classes) {
        wanted += each.slot_bytes * (each.n_experts - each.n_experts_per_layer);
    }
    const double share =
        wanted == 0 ? 1 : std::min(1.0, static_cast<double>(capacity_bytes - floor) / static_cast<double>(wanted));
    std::vector<uint32_t> n_slots;
    uint64_t used = 0;
    for (const slot_class & each : layout.classes) {
        const int beyond = each.n_experts - each.n_experts_per_layer;
        n_slots.push_back(each.n_experts_per_layer + static_cast<uint32_t>(std::floor(share * beyond)));
        used += n_slots.back() * each.slot_bytes;
    }
    for (size_t i = 0; i < n_slots.size(); ++i) { // what rounding left
        const slot_class & each = layout.classes[i];
        while (n_slots[i] < static_cast<uint32_t>(each.n_experts) && used + each.slot_bytes <= capacity_bytes) {
            ++n_slots[i];
            used += each.slot_bytes;
        }
    }
    for (size_t i = 0; i < n_slots.size(); ++i) {
        pool & pool = pools[i];
        const uint64_t n_bytes = n_slots[i] * layout.classes[i].slot_bytes;
        void * base = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED) {
            free_pools();
            throw failure(S2MOE_ERROR_NO_MEMORY,
                          "cannot reserve " + std::to_string(n_bytes) +
                              " bytes for expert slots: " + std::strerror(errno) + "; lower --memory-budget");
        }
        madvise(base, n_bytes, MADV_HUGEPAGE); // fewer address translations; only a hint
        pool.base = static_cast<std::byte *>(base);
        pool.mapped_bytes = n_bytes;
        pool.first = static_cast<uint32_t>(slots.size());
        pool.n_slots = n_slots[i];
        slots.resize(slots.size() + n_slots[i]);
        for (uint32_t j = n_slots[i]; j > 0; --j) {
            pool.free.push_back(pool.first + j - 1);
        }
        totals.capacity_experts += n_slots[i];
        totals.capacity_bytes += n_bytes;
    }
    populated = false;
    populating = std::thread([this, areas = pools] {
        for (const pool & area : areas) {
            populate(area.base, area.mapped_bytes);
        }
        const std::lock_guard ending(mutex);
        populated = true;
        population_ended.notify_all();
    });
    population_ended.wait_for(lock, population_time, [&] { return populated; });
}

// The kernel clears pages when they are first touched, which may take longer than to read them from a fast drive. An
// idle core can do that before the reads come: at once for a while, then at idle priority.
void expert_cache::populate(std::byte * base, uint64_t n_bytes) {
#if defined(MADV_POPULATE_WRITE)
    constexpr uint64_t step = 8 * 1024 * 1024;
    const auto begun = steady::now();
    for (uint64_t i = 0; i < n_bytes && !stop_populating; i += step) {
        if (steady::now() - begun > population_time) {
            const sched_param priority = {};
            sched_setscheduler(0, SCHED_IDLE, &priority); // of this thread only; harmless if it is not allowed
        }
        if (madvise(base + i, std::min(step, n_bytes - i), MADV_POPULATE_WRITE) != 0) {
            return; // an old kernel, or no memory: the reads will find out
        }
        touched_bytes += std::min(step, n_bytes - i);
    }
#endif
}

// The thread takes the mutex at its end, so it must be free.
void expert_cache::stop_population() {
    if (populating.joinable()) {
        stop_populating = true;
        populating.join();
        stop_populating = false;
    }
}

void expert_cache::free_pools() {
    for (pool & pool : pools) {
        if (pool.base != nullptr) {
            munmap(pool.base, pool.mapped_bytes);
        }
        pool = {};
    }
    slots.clear();
    touched_bytes = 0;
    totals.capacity_experts = totals.capacity_bytes = totals.resident_experts = totals.resident_bytes = 0;
}

uint64_t expert_cache::shrink(uint64_t capacity_bytes) {
    if (upper != nullptr) {
        return totals.capacity_bytes; // its pages are the GPU's, too
    }
    stop_population();
    const std::lock_guard lock(mutex);
    close_op();
    end_pass();
    const uint64_t before_bytes = std::max<uint64_t>(1, totals.capacity_bytes);
    for (size_t i = 0; i < pools.size(); ++i) {
        pool & pool = pools[i];
        const slot_class & each = layout.classes[i];
        // each class gives in proportion to what it has
        const double share = static_cast<double>(capacity_bytes) / static_cast<double>(before_bytes);
        uint32_t n_left = n_live(static_cast<int>(i));
        const auto n_target = std::max(static_cast<uint32_t>(each.n_experts_per_layer),
                                       static_cast<uint32_t>(std::floor(n_left * std::min(share, 1.0))));
        if (is_static) {
            cool(static_cast<int>(i), n_hot_max(static_cast<int>(i), n_target));
        }
        while (n_left > n_target) {
            uint32_t victim = take_free(static_cast<int>(i));
            if (victim == no_slot) {
                victim = find_victim(pool, false);
                if (victim == no_slot) {
                    victim = find_victim(pool, true);
                }
                if (victim == no_slot) {
                    break;
                }
                release(victim, true);
                std::erase(pool.free, victim);
            }
            slots[victim].retired = true;
            madvise(part_base(victim, 0), each.slot_bytes, MADV_DONTNEED);
            --n_left;
        }
    }
    return count_slots();
}

uint64_t expert_cache::grow(uint64_t capacity_bytes) {
    stop_population();
    const std::lock_guard lock(mutex);
    uint64_t retired_bytes = 0;
    for (size_t i = 0; i < pools.size(); ++i) {
        retired_bytes += (pools[i].n_slots - n_live(static_cast<int>(i))) * layout.classes[i].slot_bytes;
    }
    if (is_static || capacity_bytes <= totals.capacity_bytes || retired_bytes == 0) {
        return totals.capacity_bytes;
    }
    // each class takes in proportion to what it gave
    const double share = std::min(1.0, static_cast<double>(capacity_bytes - totals.capacity_bytes) / retired_bytes);
    for (size_t i = 0; i < pools.size(); ++i) {
        pool & pool = pools[i];
        auto n_back = static_cast<uint32_t>(std::floor((pool.n_slots - n_live(static_cast<int>(i))) * share));
        for (uint32_t s = pool.first; s < pool.first + pool.n_slots && n_back > 0; ++s) {
            if (slots[s].retired) {
                slots[s].retired = false;
                pool.free.push_back(s);
                --n_back;
            }
        }
    }
    return count_slots();
}

// Of those that are not given back; returns their bytes.
uint64_t expert_cache::count_slots() {
    totals.capacity_bytes = totals.capacity_experts = 0;
    for (size_t i = 0; i < pools.size(); ++i) {
        const uint64_t n_slots = n_live(static_cast<int>(i));
        totals.capacity_experts += n_slots;
        totals.capacity_bytes += n_slots * layout.classes[i].slot_bytes;
    }
    return totals.capacity_bytes;
}

int expert_cache::class_of_slot(uint32_t slot) const {
    for (size_t i = 0; i < pools.size(); ++i) {
        if (slot - pools[i].first < pools[i].n_slots) {
            return static_cast<int>(i);
        }
    }
    return -1;
}

std::byte * expert_cache::part_base(uint32_t slot, int part) const {
    const int slot_class = class_of_slot(slot);
    const auto & each = layout.classes[slot_class];
    const pool & pool = pools[slot_class];
    std::byte * base = pool.base + (slot - pool.first) * each.slot_bytes;
    for (int i = 0; i < part; ++i) {
        base += each.part_bytes[i];
    }
    return base;
}

uint64_t expert_cache::part_offset(uint32_t entry, int part) const {
    const expert_part & matrix = layer_of_entry(entry).parts[part];
    return matrix.offset + entry % n_expert * matrix.bytes;
}

// A matrix lies in its part as it lay in its blocks of the file.
std::byte * expert_cache::part_data(uint32_t slot, int part) const {
    return part_base(slot, part) + part_offset(slots[slot].owner, part) % io_alignment;
}

void expert_cache::build_read(const queued_read & queued, read_request & request) const {
    const uint32_t owner = slots[queued.slot].owner;
    const expert_part & matrix = layer_of_entry(owner).parts[queued.part];
    const uint64_t begin = part_offset(owner, queued.part);
    const uint64_t end = begin + matrix.bytes;
    request.file = matrix.file;
    request.offset = begin / io_alignment * io_alignment;
    request.n_bytes = (end - request.offset + io_alignment - 1) / io_alignment * io_alignment;
    request.n_needed = end - request.offset;
    request.to = part_base(queued.slot, queued.part);
    request.tag = static_cast<uint64_t>(queued.slot) * n_parts_max + queued.part;
}

// ── slots ────────────────────────────────────────────────────────────────────────────────────────

uint32_t expert_cache::take_free(int slot_class) {
    auto & free = pools[slot_class].free;
    if (free.empty()) {
        return no_slot;
    }
    const uint32_t slot = free.back();
    free.pop_back();
    return slot;
}

uint32_t expert_cache::find_victim(const pool & pool, bool also_pinned) const {
    if (is_static) {
        return no_slot;
    }
    uint32_t victim = no_slot;
    double least = 0;
    for (uint32_t s = pool.first; s < pool.first + pool.n_slots; ++s) {
        const slot & candidate = slots[s];
        if (candidate.owner == no_slot || candidate.in_pass || candidate.held || candidate.n_reading > 0) {
            continue;
        }
        const entry & owner = entries[candidate.owner];
        const bool kept = owner.pinned || (owner.prefetched && owner.kept_until >= clock) ||
                          static_cast<int>(candidate.owner / n_expert) == ahead_index;
        if (kept && !also_pinned) {
            continue;
        }
        if (victim == no_slot || owner.use.score() < least) {
            victim = s;
            least = owner.use.score();
        }
    }
    return victim;
}

// A slot for an expert without which the decode cannot go on.
uint32_t expert_cache::demand_slot(int slot_class, std::unique_lock<std::mutex> & lock) {
    while (true) {
        uint32_t slot = take_free(slot_class);
        if (slot != no_slot) {
            return slot;
        }
        slot = find_victim(pools[slot_class], false);
        if (slot == no_slot) {
            slot = find_victim(pools[slot_class], true);
        }
        if (slot != no_slot) {
            release(slot, true);
            return take_free(slot_class);
        }
        if (n_reading == 0 || reader_error != 0) {
            return no_slot; // fewer slots than a layer has experts
        }
        slot_freed.wait(lock); // prefetches are landing in all that could be had
    }
}

void expert_cache::assign(uint32_t index, uint32_t owner, s2moe_trigger trigger) {
    slot & target = slots[index];
    target.owner = owner;
    target.broken = false;
    target.trigger = trigger;
    target.requested = steady::now();
    target.n_missing = static_cast<int>(layer_of_entry(owner).parts.size());
    target.parts.fill(part_state::empty);
    std::fill_n(target.parts.begin(), target.n_missing, part_state::queued);
    entries[owner].slot = index;
    entries[owner].prefetched = trigger == S2MOE_TRIGGER_PREFETCH;
}

void expert_cache::enqueue(uint32_t index, s2moe_trigger trigger) {
    for (int part = 0; part < n_parts_max; ++part) {
        if (slots[index].parts[part] == part_state::queued) {
            queues[trigger].push_back({index, slots[index].generation, part});
        }
    }
}

// Takes the expert out of a slot that no read is writing to.
void expert_cache::release(uint32_t index, bool count_eviction) {
    slot & target = slots[index];
    const int slot_class = class_of_slot(index);
    if (target.counted) {
        totals.resident_experts -= 1;
        totals.resident_bytes -= layout.classes[slot_class].slot_bytes;
        totals.evictions += count_eviction;
    }
    entry & owner = entries[target.owner];
    if (owner.prefetched && count_eviction) {
        ++totals.prefetches_wasted;
    }
    owner.slot = no_slot;
    owner.prefetched = false;
    target.owner = no_slot;
    target.generation += 1; // makes what is still queued for it void
    target.in_pass = false;
    target.broken = false;
    target.counted = false;
    target.n_missing = 0;
    target.parts.fill(part_state::empty);
    pools[slot_class].free.push_back(index);
}

// ── policy "static" ──────────────────────────────────────────────────────────────────────────────

uint32_t expert_cache::n_live(int slot_class) const {
    const pool & pool = pools[slot_class];
    uint32_t n = 0;
    for (uint32_t s = pool.first; s < pool.first + pool.n_slots; ++s) {
        n += !slots[s].retired;
    }
    return n;
}

// Of a class with so many slots. Where every expert has a slot of its own, none is needed for others.
uint32_t expert_cache::n_hot_max(int slot_class, uint32_t n_slots) const {
    const auto & each = layout.classes[slot_class];
    return n_slots >= static_cast<uint32_t>(each.n_experts) ? n_slots : n_slots - each.n_experts_per_layer;
}

std::vector<uint32_t> expert_cache::hot_entries(int slot_class) const {
    std::vector<uint32_t> result;
    for (uint32_t index = 0; index < entries.size(); ++index) {
        if (entries[index].hot && class_of_entry(index) == slot_class) {
            result.push_back(index);
        }
    }
    return result;
}

// Leaves hot the n_max most used ones of a class.
void expert_cache::cool(int slot_class, uint32_t n_max) {
    std::vector<uint32_t> hot = hot_entries(slot_class);
    std::stable_sort(hot.begin(), hot.end(), [&](uint32_t a, uint32_t b) {
        return entries[a].use.score() > entries[b].use.score();
    });
    for (size_t i = n_max; i < hot.size(); ++i) {
        entry & each = entries[hot[i]];
        each.hot = false;
        if (each.slot == no_slot) {
            continue;
        }
        totals.evictions += slots[each.slot].counted;
        give_up(each.slot);
    }
}

// Takes the expert out of its slot, now or when the reads that write to it have landed.
void expert_cache::give_up(uint32_t index) {
    slot & target = slots[index];
    if (target.n_reading == 0) {
        release(index, false);
        return;
    }
    target.broken = true; // landed() releases it
    std::replace(target.parts.begin(), target.parts.end(), part_state::queued, part_state::empty);
}

// Forgets what is queued and waits for what is being read.
void expert_cache::drain(std::unique_lock<std::mutex> & lock) {
    for (auto & queue : queues) {
        queue.clear();
    }
    slot_freed.wait(lock, [&] { return n_reading == 0 || reader_error != 0; });
    for (uint32_t s = 0; s < slots.size(); ++s) {
        if (slots[s].owner != no_slot && slots[s].n_missing > 0 && slots[s].n_reading == 0) {
            release(s, false);
        }
    }
}

// ── reads ────────────────────────────────────────────────────────────────────────────────────────

bool expert_cache::take(read_request & request) {
    const std::lock_guard lock(mutex);
    const auto now = steady::now();
    const bool taken = take_from(queues[S2MOE_TRIGGER_DEMAND], request) ||
                       (n_reading < prefetches_max && take_from(queues[S2MOE_TRIGGER_PREFETCH], request)) ||
                       (n_reading < warmups_max && take_from(queues[S2MOE_TRIGGER_WARMUP], request));
    if (taken && n_reading++ == 0) {
        busy_since = now;
        busy_bytes = 0;
    }
    return taken;
}

bool expert_cache::take_from(std::deque<queued_read> & queue, read_request & request) {
    while (!queue.empty()) {
        const queued_read next = queue.front();
        queue.pop_front();
        slot & target = slots[next.slot];
        if (target.generation == next.generation && target.parts[next.part] == part_state::queued) {
            const bool first = target.n_missing == static_cast<int>(layer_of_entry(target.owner).parts.size());
            if (first && target.n_reading == 0 && target.trigger != S2MOE_TRIGGER_DEMAND) {
                target.requested = steady::now(); // until now it was not urgent
            }
            target.parts[next.part] = part_state::reading;
            target.n_reading += 1;
            build_read(next, request);
            return true;
        }
    }
    return false;
}

void expert_cache::landed(const read_request & request, int error) {
    std::unique_lock lock(mutex);
    const auto index = static_cast<uint32_t>(request.tag / n_parts_max);
    const int part = static_cast<int>(request.tag % n_parts_max);
    slot & target = slots[index];
    busy_bytes += request.n_bytes;
    n_reading -= 1;
    target.n_reading -= 1;
    note_reads(steady::now());
    if (error == 0) {
        target.parts[part] = part_state::raw;
        totals.load_bytes[target.trigger] += request.n_bytes;
        if (--target.n_missing == 0 && !target.broken) {
            whole_slot_landed(target);
        }
        const auto waiting = std::find_if(
            op.waiting.begin(), op.waiting.end(), [&](const op_expert & each) { return each.slot == index; });
        if (op.open && part == op.part && waiting != op.waiting.end()) {
            op_expert expert = *waiting;
            op.waiting.erase(waiting);
            expert.data = part_data(index, part);
            expert.raw = true;
            deliver(expert);
        }
    } else {
        ++totals.read_errors;
        target.broken = true;
        target.parts[part] = part_state::empty;
        if (target.in_pass) {
            const expert_part & matrix = layer_of_entry(target.owner).parts[part];
            if (error == ENOMEM || error == EFAULT) {
                fail_locked(S2MOE_ERROR_NO_MEMORY,
                            "the system has no memory for the expert slots; lower --memory-budget");
            }
            const std::string why = error == ENODATA  ? "the file is shorter than it was"
                                    : error == ESTALE ? "the file was changed after it was opened"
                                                      : std::strerror(error);
            fail_locked(S2MOE_ERROR_IO,
                        layout.files[matrix.file].path + ": reading " + matrix.tensor + ": " + why +
                            "; restore the file and restart the server");
        }
    }
    if (target.broken && target.n_reading == 0 && !(target.in_pass && op.open)) {
        release(index, false);
    }
    slot_freed.notify_all();
}

void expert_cache::reader_died(int error) {
    const std::lock_guard lock(mutex);
    reader_error = error;
    fail_reader();
    slot_freed.notify_all();
}

void expert_cache::fail_reader() {
    fail_locked(S2MOE_ERROR_IO,
                "io_uring failed: " + std::string(std::strerror(reader_error)) +
                    "; restart the server with --reader threads");
}

void expert_cache::whole_slot_landed(slot & target) {
    const double duration = seconds(steady::now() - target.requested);
    static constexpr double bounds[] = S2MOE_LOAD_BUCKETS;
    const auto bucket = std::lower_bound(std::begin(bounds), std::end(bounds), duration) - std::begin(bounds);
    totals.load_duration_counts[bucket] += 1;
    totals.load_duration_seconds += duration;
    totals.loads[target.trigger] += 1;
    target.counted = true;
    totals.resident_experts += 1;
    totals.resident_bytes += layout.classes[class_of_entry(target.owner)].slot_bytes;
}

// Accounts for the time in which reads were in flight.
void expert_cache::note_reads(steady::time_point now) {
    const auto busy = now - busy_since;
    if (n_reading > 0 && busy < sample_time) {
        return;
    }
    totals.read_seconds += seconds(busy);
    if (busy_bytes >= sample_bytes && busy.count() > 0) {
        average(bytes_per_second, static_cast<double>(busy_bytes) / seconds(busy));
    }
    busy_since = now;
    busy_bytes = 0;
}

// ── the compute threads ──────────────────────────────────────────────────────────────────────────

void expert_cache::begin_decode(decode_kind next) {
    {
        const std::lock_guard lock(mutex);
        close_op();
        end_pass();
        kind = next;
        clock += upper != nullptr && kind != decode_kind::draft;
        decode_failed.store(false, std::memory_order_release);
        if (reader_error != 0) {
            fail_reader();
        }
    }
    if (upper != nullptr) {
        upper.load()->begin_decode(next);
    }
}

void expert_cache::end_decode() {
    if (upper != nullptr) {
        upper.load()->end_decode();
    }
    const std::lock_guard lock(mutex);
    close_op();
    end_pass();
    kind = decode_kind::by_width;
    if (failed()) {
        decode_failed.store(false, std::memory_order_release);
        throw failure(failure_status, failure_message);
    }
}

void expert_cache::begin_op(int layer_index, int part, std::span<const int32_t> n_rows, int n_tokens) {
    std::unique_lock lock(mutex);
    close_op();
    if (current.layer_index != layer_index || (current.parts_seen & (1U << part)) != 0) {
        if (kind == decode_kind::draft) {
            begin_draft_pass(layer_index, n_rows);
        } else {
            begin_pass(layer_index, n_rows, n_tokens, lock);
        }
    }
    current.parts_seen |= 1U << part;

    op.layer_index = layer_index;
    op.part = part;
    op.experts.clear();
    op.waiting.clear();
    const auto first = static_cast<uint32_t>(layer_index * n_expert);
    std::vector<op_expert> raw; // in memory, but not packed: after those that are
    for (size_t expert = 0; expert < n_rows.size(); ++expert) {
        if (n_rows[expert] == 0) {
            continue;
        }
        op_expert each;
        each.expert = static_cast<int>(expert);
        each.n_rows = n_rows[expert];
        each.slot = entries[first + expert].slot;
        if (kind == decode_kind::draft && (each.slot == no_slot || !slots[each.slot].in_pass)) {
            op.experts.push_back(each);
            continue;
        }
        if (each.slot == no_slot) {
            fail_locked(S2MOE_ERROR_INTERNAL, "the expert cache lost an expert of the layer that is being computed");
        }
        if (failed()) {
            op.experts.push_back(each);
            continue;
        }
        const part_state state = slots[each.slot].parts[part];
        if (state == part_state::packed || state == part_state::raw) {
            each.data = part_data(each.slot, part);
            each.raw = state == part_state::raw;
            (each.raw ? raw : op.experts).push_back(each);
        } else {
            op.waiting.push_back(each);
        }
    }
    op.experts.insert(op.experts.end(), raw.begin(), raw.end());
    op.n_total = static_cast<int>(op.experts.size() + op.waiting.size());
    op.next_chunk.store(0, std::memory_order_relaxed);
    op.waited_ns.store(0, std::memory_order_relaxed);
    op.n_ready.store(static_cast<int>(op.experts.size()), std::memory_order_release);
    op.open = true;
    op.begun = op.ended = steady::now();
}

const op_expert & expert_cache::wait_expert(int i) {
    int n_ready = op.n_ready.load(std::memory_order_acquire);
    if (n_ready <= i) {
        const auto begun = steady::now();
        do {
            op.n_ready.wait(n_ready, std::memory_order_acquire);
            n_ready = op.n_ready.load(std::memory_order_acquire);
        } while (n_ready <= i);
        op.waited_ns.fetch_add((steady::now() - begun).count(), std::memory_order_relaxed);
    }
    return op.experts[i];
}

void expert_cache::abandon_op(const char * why) {
    const std::lock_guard lock(mutex);
    fail_locked(S2MOE_ERROR_NO_MEMORY, std::string("no memory for the bookkeeping of experts: ") + why);
    op.experts.clear();
    op.waiting.clear();
    op.n_total = 0;
    op.n_ready.store(0, std::memory_order_release);
}

void expert_cache::end_op() {
    op.ended = steady::now();
}

// Passes an expert to the compute threads. op.experts never grows beyond what was reserved.
void expert_cache::deliver(op_expert expert) {
    op.experts.push_back(expert);
    op.n_ready.store(static_cast<int>(op.experts.size()), std::memory_order_release);
    op.n_ready.notify_all();
}

void expert_cache::fail(s2moe_status status, const std::string & message) {
    const std::lock_guard lock(mutex);
    fail_locked(status, message);
}

void expert_cache::fail_locked(s2moe_status status, const std::string & message) {
    if (!failed()) {
        failure_status = status;
        failure_message = message;
        decode_failed.store(true, std::memory_order_release);
    }
    if (op.open) {
        for (const op_expert & each : std::exchange(op.waiting, {})) {
            deliver({.expert = each.expert, .n_rows = each.n_rows, .data = nullptr, .raw = false, .slot = each.slot});
        }
    }
}

// All compute threads have left the last op, if there is one.
void expert_cache::close_op() {
    if (!op.open) {
        return;
    }
    op.open = false;
    const double waited = static_cast<double>(op.waited_ns.load(std::memory_order_relaxed)) * 1e-9 / n_threads;
    const double computed = std::max(0.0, seconds(op.ended - op.begun) - waited);
    if (kind != decode_kind::draft) {
        const auto phase = current.prefill ? S2MOE_PHASE_PREFILL : S2MOE_PHASE_DECODE;
        totals.stall_seconds[phase] += waited;
        totals.compute_seconds[phase] += computed;
        current.trace.stall_seconds += waited;
        current.trace.compute_seconds += computed;
    }
    for (const op_expert & each : op.experts) {
        if (each.slot == no_slot || each.data == nullptr) {
            continue;
        }
        slot & target = slots[each.slot];
        if (!each.raw || target.parts[op.part] != part_state::raw || upper != nullptr) {
            continue; // for an upper tier nobody packs
        }
        if (!failed()) {
            target.parts[op.part] = part_state::packed;
        } else {
            target.broken = true; // some of its rows may be packed
        }
    }
    if (failed()) {
        for (const uint32_t s : current.slots) {
            if (slots[s].owner != no_slot && slots[s].broken && slots[s].n_reading == 0) {
                release(s, false);
            }
        }
    }
}

void expert_cache::end_pass() {
    if (current.layer_index < 0) {
        return;
    }
    for (const uint32_t s : current.slots) {
        slots[s].in_pass = false;
        if (slots[s].owner == no_slot) {
            continue;
        }
        if (is_static && !entries[slots[s].owner].hot) {
            give_up(s);
        } else if (slots[s].broken && slots[s].n_reading == 0) { // a failed decode leaves experts half requested
            release(s, false);
        }
    }
    if (n_trace_max > 0 && kind != decode_kind::draft) {
        if (static_cast<int64_t>(trace.size()) >= n_trace_max) {
            trace.pop_front();
        }
        trace.push_back(current.trace);
    }
    const bool computes = upper == nullptr; // else these seconds are those of copies
    if (computes && !current.prefill && current.trace.n_tokens == 1 && kind != decode_kind::draft && !failed()) {
        average(hit_seconds,
                current.trace.compute_seconds / std::max(1, current.trace.n_hits + current.trace.n_misses));
    }
    current.layer_index = -1;
    current.slots.clear();
}

void expert_cache::begin_pass(int layer_index,
                              std::span<const int32_t> n_rows,
                              int n_tokens,
                              std::unique_lock<std::mutex> & lock) {
    const int previous = current.layer_index;
    end_pass();
    if (previous < 0 || layer_index <= previous) {
        clock += upper == nullptr; // else begin_decode() has counted
        n_tokens_seen += is_prompt(kind, n_tokens) ? 1 : n_tokens;
        // of the whole decode: the last layer of a prompt often computes its last token only
        current.prefill = is_prompt(kind, n_tokens);
    }
    current.layer_index = layer_index;
    current.parts_seen = 0;
    current.trace = {};
    current.trace.begin_ns = monotonic_ns(steady::now());
    current.trace.layer = layout.layers[layer_index].layer;
    current.trace.n_tokens = n_tokens;
    if (ahead_index <= layer_index) {
        ahead_index = -1;
    }
    if (failed()) {
        return;
    }
    const auto phase = current.prefill ? S2MOE_PHASE_PREFILL : S2MOE_PHASE_DECODE;
    const auto first = static_cast<uint32_t>(layer_index * n_expert);
    // of an expert that is in a slot or on its way
    const auto claim = [&](entry & wanted) {
        slot & found = slots[wanted.slot];
        found.in_pass = true;
        current.slots.push_back(wanted.slot);
        const bool whole = found.n_missing == 0;
        if (wanted.prefetched) {
            ++(whole ? totals.prefetches_used : totals.prefetches_late);
        }
        ++(whole && !wanted.prefetched ? totals.hits : totals.prefetched)[phase];
        ++current.trace.n_hits;
        wanted.prefetched = false;
    };
    std::vector<uint32_t> missing;
    // all that is there is claimed before anything is evicted
    for (size_t expert = 0; expert < n_rows.size(); ++expert) {
        if (n_rows[expert] == 0) {
            continue;
        }
        const auto index = first + static_cast<uint32_t>(expert);
        entry & wanted = entries[index];
        if (current.prefill) {
            wanted.use.add(prompt_weight * n_rows[expert] / n_tokens, n_tokens_seen);
        } else {
            wanted.use.add(n_rows[expert], n_tokens_seen);
            wanted.n_used += n_rows[expert];
        }
        if (wanted.slot != no_slot && slots[wanted.slot].broken) {
            if (slots[wanted.slot].n_reading > 0) {
                slot_freed.wait(lock, [&] {
                    return wanted.slot == no_slot || slots[wanted.slot].n_reading == 0 || reader_error != 0;
                });
            }
            if (wanted.slot != no_slot && slots[wanted.slot].n_reading == 0) {
                release(wanted.slot, false);
            }
        }
        if (wanted.slot == no_slot) {
            missing.push_back(index);
            continue;
        }
        claim(wanted);
    }
    const int slot_class = layout.layers[layer_index].slot_class;
    for (const uint32_t index : missing) {
        const uint32_t s = demand_slot(slot_class, lock);
        if (entries[index].slot != no_slot && s != no_slot) {
            pools[slot_class].free.push_back(s);
            claim(entries[index]); // somebody prefetched it while the mutex was free
            continue;
        }
        if (s == no_slot) {
            fail_locked(S2MOE_ERROR_INTERNAL, "the expert cache has fewer slots than this batch needs");
            return;
        }
        assign(s, index, S2MOE_TRIGGER_DEMAND);
        slots[s].in_pass = true;
        current.slots.push_back(s);
        ++totals.misses[phase];
        ++current.trace.n_misses;
        current.trace.missed_bytes += layer_of_entry(index).expert_bytes();
    }
    // the first matrices of all, then the second ones: as the graph uses them
    // (a prefetch that has become urgent is queued again here)
    for (int part = 0; part < n_parts_max; ++part) {
        for (const uint32_t s : current.slots) {
            if (slots[s].parts[part] == part_state::queued) {
                queues[S2MOE_TRIGGER_DEMAND].push_back({s, slots[s].generation, part});
            }
        }
    }
    const auto n_used = static_cast<double>(current.slots.size());
    if (current.prefill && !is_static && n_used >= read_ahead_share * n_expert) {
        read_ahead(layer_index + 1);
    }
    if (!queues[S2MOE_TRIGGER_DEMAND].empty() || ahead_index >= 0) {
        reader->wake();
    }
}

// What a draft uses stays while it does, and is not counted: the target has not chosen it.
void expert_cache::begin_draft_pass(int layer_index, std::span<const int32_t> n_rows) {
    end_pass();
    current.layer_index = layer_index;
    current.parts_seen = 0;
    current.prefill = false;
    current.trace = {};
    for (size_t expert = 0; expert < n_rows.size(); ++expert) {
        const auto index = static_cast<uint32_t>(layer_index * n_expert + static_cast<int>(expert));
        if (n_rows[expert] > 0 && residency_of(index) == S2MOE_RESIDENT) {
            slots[entries[index].slot].in_pass = true;
            current.slots.push_back(entries[index].slot);
        }
    }
}

// While a prompt's batch is computed in one layer, the drive reads the next.
void expert_cache::read_ahead(int layer_index) {
    if (layer_index >= static_cast<int>(layout.layers.size())) {
        return;
    }
    ahead_index = layer_index;
    std::vector<uint32_t> wanted;
    for (uint32_t e = 0; e < static_cast<uint32_t>(n_expert); ++e) {
        const uint32_t index = layer_index * n_expert + e;
        if (entries[index].slot == no_slot && !is_above(index)) {
            wanted.push_back(index);
        }
    }
    std::sort(wanted.begin(), wanted.end(), [&](uint32_t a, uint32_t b) {
        return entries[a].use.score() > entries[b].use.score();
    });
    for (const uint32_t index : wanted) {
        if (!prefetch_one(index, S2MOE_PRIORITY_PREFETCH)) {
            return;
        }
    }
}

// ── everybody ────────────────────────────────────────────────────────────────────────────────────

int expert_cache::layer_index(int layer) const {
    const auto found =
        std::lower_bound(layout.layers.begin(), layout.layers.end(), layer, [](const expert_layer & each, int number) {
            return each.layer < number;
        });
    return found != layout.layers.end() && found->layer == layer ? static_cast<int>(found - layout.layers.begin()) : -1;
}

std::string expert_cache::reader_json() const {
    std::string reason = files.reason;
    if (!reader_reason.empty()) {
        reason += (reason.empty() ? "" : "; ") + reader_reason;
    }
    const common_json result = {{"io", files.direct ? "direct" : "buffered"},
                                {"reader", reader->name()},
                                {"queue_depth", queue_depth},
                                {"reason", reason}};
    return result.dump();
}

void expert_cache::stats(s2moe_expert_stats & result) const {
    s2moe_device_stats above = {};
    if (upper != nullptr) {
        upper.load()->stats(above);
    }
    const std::lock_guard lock(mutex);
    result = totals;
    if (upper != nullptr) {
        std::copy_n(above.hits, S2MOE_N_PHASES, result.hits);
        std::copy_n(above.misses, S2MOE_N_PHASES, result.misses);
        std::copy_n(above.prefetched, S2MOE_N_PHASES, result.prefetched);
        std::copy_n(above.wait_seconds, S2MOE_N_PHASES, result.stall_seconds);
    }
    result.touched_bytes =
        std::max<uint64_t>(totals.resident_bytes, std::min<uint64_t>(touched_bytes, totals.capacity_bytes));
    if (n_reading > 0) {
        result.read_seconds += seconds(steady::now() - busy_since);
    }
}

uint32_t expert_cache::entry_of(const s2moe_expert_id & id) const {
    const int index = layer_index(id.layer);
    if (index < 0 || id.expert < 0 || id.expert >= layout.layers[index].n_expert) {
        throw failure(S2MOE_ERROR_INVALID,
                      "there is no expert " + std::to_string(id.expert) + " in layer " + std::to_string(id.layer));
    }
    return static_cast<uint32_t>(index * n_expert + id.expert);
}

void expert_cache::join(upper_tier * tier) {
    const std::lock_guard lock(mutex);
    if (tier != nullptr && (totals.capacity_bytes == 0 || is_static)) {
        throw failure(S2MOE_ERROR_INVALID,
                      is_static ? "a GPU's slots need the policy \"cache\"" : "the expert cache has no slots yet");
    }
    upper.store(tier);
}

bool expert_cache::is_above(uint32_t entry) const {
    return upper != nullptr && upper.load()->residency(entry) != S2MOE_ABSENT;
}

std::vector<slot_area> expert_cache::areas() const {
    std::vector<slot_area> result;
    for (size_t i = 0; i < pools.size(); ++i) {
        result.push_back({{pools[i].base, pools[i].mapped_bytes}, layout.classes[i].slot_bytes});
    }
    return result;
}

void expert_cache::note_tensor(int layer_index, int part, const ggml_tensor * tensor) {
    const std::lock_guard lock(mutex);
    tensors.resize(layout.layers.size());
    tensors[layer_index][part] = tensor;
}

const ggml_tensor * expert_cache::tensor(int layer_index, int part) const {
    const std::lock_guard lock(mutex);
    return tensors.empty() ? nullptr : tensors[layer_index][part];
}

bool expert_cache::hold(uint32_t entry, std::span<std::byte *> parts) {
    const std::lock_guard lock(mutex);
    const uint32_t s = entries[entry].slot;
    if (s == no_slot || slots[s].broken || slots[s].n_missing > 0) {
        return false;
    }
    slots[s].held = true;
    for (size_t part = 0; part < layer_of_entry(entry).parts.size(); ++part) {
        parts[part] = part_data(s, static_cast<int>(part));
    }
    return true;
}

void expert_cache::unhold(uint32_t entry) {
    const std::lock_guard lock(mutex);
    slots[entries[entry].slot].held = false;
}

void expert_cache::note_uses(uint32_t entry, uint64_t n_rows) {
    const std::lock_guard lock(mutex);
    entries[entry].n_used += n_rows;
}

std::unique_ptr<gate_device> expert_cache::create_gate(int n_layer, int n_expert_in_layer, int n_ids) const {
    return upper == nullptr ? nullptr : upper.load()->create_gate(n_layer, n_expert_in_layer, n_ids);
}

void expert_cache::note_synchronization() {
    if (upper != nullptr) {
        upper.load()->note_synchronization();
    }
}

void expert_cache::device_stats(s2moe_device_stats & result) const {
    result = {};
    if (upper != nullptr) {
        upper.load()->stats(result);
        const std::lock_guard lock(mutex);
        std::copy_n(totals.misses, S2MOE_N_PHASES, result.host_misses);
    }
}

uint64_t expert_cache::n_at_hand() const {
    if (upper != nullptr) {
        s2moe_device_stats above = {};
        upper.load()->stats(above);
        return above.resident_experts;
    }
    const std::lock_guard lock(mutex);
    return totals.resident_experts;
}

s2moe_residency expert_cache::residency_of(uint32_t entry) const {
    if (upper != nullptr) {
        return static_cast<s2moe_residency>(upper.load()->residency(entry));
    }
    const uint32_t s = entries[entry].slot;
    if (s == no_slot || slots[s].broken) {
        return S2MOE_ABSENT;
    }
    return slots[s].n_missing > 0 ? S2MOE_IN_FLIGHT : S2MOE_RESIDENT;
}

void expert_cache::residency(int layer_index, std::span<uint8_t> mask) const {
    const std::lock_guard lock(mutex);
    for (size_t e = 0; e < mask.size(); ++e) {
        mask[e] = residency_of(static_cast<uint32_t>(layer_index * n_expert + static_cast<int>(e)));
    }
}

void expert_cache::residency(std::span<uint8_t> mask) const {
    const std::lock_guard lock(mutex);
    for (size_t i = 0; i < mask.size(); ++i) {
        mask[i] = residency_of(static_cast<uint32_t>(i));
    }
}

bool expert_cache::prefetch_one(uint32_t index, s2moe_priority priority) {
    if (const uint32_t s = entries[index].slot; s != no_slot) {
        if (priority == S2MOE_PRIORITY_PREFETCH && slots[s].trigger == S2MOE_TRIGGER_WARMUP) {
            enqueue(s, S2MOE_TRIGGER_PREFETCH); // what is still queued goes before other warm-ups
        }
        return true;
    }
    const int slot_class = class_of_entry(index);
    uint32_t s = take_free(slot_class);
    if (s == no_slot && priority == S2MOE_PRIORITY_PREFETCH) {
        const uint32_t victim = find_victim(pools[slot_class], false);
        if (victim != no_slot) {
            release(victim, true);
            s = take_free(slot_class);
        }
    }
    if (s == no_slot) {
        return false;
    }
    const auto trigger = priority == S2MOE_PRIORITY_PREFETCH ? S2MOE_TRIGGER_PREFETCH : S2MOE_TRIGGER_WARMUP;
    assign(s, index, trigger);
    enqueue(s, trigger);
    return true;
}

int expert_cache::prefetch(std::span<const s2moe_expert_id> ids, s2moe_priority priority) {
    std::vector<uint32_t> wanted;
    for (const s2moe_expert_id & id : ids) {
        wanted.push_back(entry_of(id));
    }
    if (is_static) {
        return 0;
    }
    const int n_queued = prefetch_entries(wanted, priority);
    if (upper != nullptr && priority == S2MOE_PRIORITY_PREFETCH) {
        upper.load()->promote(wanted);
    }
    return n_queued;
}

int expert_cache::prefetch_entries(std::span<const uint32_t> wanted, s2moe_priority priority) {
    const std::lock_guard lock(mutex);
    int n_queued = 0;
    std::vector<uint32_t> kept; // the set does not evict its own members
    for (const uint32_t index : wanted) {
        if (!entries[index].pinned) {
            entries[index].pinned = true;
            kept.push_back(index);
        }
    }
    for (const uint32_t index : wanted) {
        n_queued += is_above(index) || prefetch_one(index, priority);
        entries[index].kept_until = clock + prefetch_decodes;
    }
    for (const uint32_t index : kept) {
        entries[index].pinned = false;
    }
    reader->wake();
    return n_queued;
}

int expert_cache::cancel_prefetches() {
    if (is_static) {
        return 0;
    }
    const std::lock_guard lock(mutex);
    int n = 0;
    for (const auto trigger : {S2MOE_TRIGGER_PREFETCH, S2MOE_TRIGGER_WARMUP}) {
        for (const queued_read & each : std::exchange(queues[trigger], {})) {
            slot & target = slots[each.slot];
            const bool untouched = target.generation == each.generation && target.n_reading == 0 && !target.in_pass &&
                                   target.n_missing == static_cast<int>(layer_of_entry(target.owner).parts.size());
            if (untouched) {
                release(each.slot, false);
                ++n;
            } else if (target.generation == each.generation && target.parts[each.part] == part_state::queued) {
                queues[trigger].push_back(each); // begun: finish it
            }
        }
    }
    return n;
}

void expert_cache::pin(std::span<const s2moe_expert_id> ids) {
    std::vector<uint32_t> wanted;
    for (const s2moe_expert_id & id : ids) {
        wanted.push_back(entry_of(id));
    }
    {
        const std::lock_guard lock(mutex);
        for (entry & each : entries) {
            each.pinned = false;
        }
        for (const uint32_t index : wanted) {
            entries[index].pinned = true;
        }
    }
    if (upper != nullptr) {
        upper.load()->keep(wanted);
    }
}

s2moe_expert_costs expert_cache::costs() const {
    s2moe_device_stats above = {};
    device_stats(above);
    const std::lock_guard lock(mutex);
    s2moe_expert_costs result = {};
    result.hit_seconds = hit_seconds;
    result.bytes_per_second = bytes_per_second;
    if (bytes_per_second > 0 && !entries.empty()) {
        const double expert_bytes = static_cast<double>(layout.expert_bytes) / static_cast<double>(entries.size());
        uint64_t n_parts = 0;
        for (const auto & queue : queues) {
            n_parts += queue.size();
        }
        n_parts += n_reading;
        const double part_bytes = expert_bytes / static_cast<double>(layout.layers[0].parts.size());
        result.miss_seconds = expert_bytes / bytes_per_second;
        result.queued_seconds = static_cast<double>(n_parts) * part_bytes / bytes_per_second;
    }
    if (const uint64_t n_missed = above.misses[S2MOE_PHASE_DECODE]; n_missed > 0) {
        result.miss_seconds = above.wait_seconds[S2MOE_PHASE_DECODE] / static_cast<double>(n_missed);
    }
    return result;
}

void expert_cache::counts(std::span<uint64_t> result) const {
    const std::lock_guard lock(mutex);
    for (size_t i = 0; i < entries.size(); ++i) {
        result[i] = entries[i].n_used;
    }
}

void expert_cache::warm(std::span<const uint64_t> counts) {
    const std::lock_guard lock(mutex);
    std::vector<std::pair<double, uint32_t>> wanted; // uses per decode
    for (size_t layer = 0; layer < layout.layers.size(); ++layer) {
        double sum = 0;
        for (int e = 0; e < n_expert; ++e) {
            sum += static_cast<double>(counts[layer * n_expert + e]);
        }
        for (int e = 0; e < n_expert && sum > 0; ++e) {
            const auto index = static_cast<uint32_t>(layer * n_expert + e);
            const double rate = static_cast<double>(layout.n_expert_used) * static_cast<double>(counts[index]) / sum;
            if (rate > 0) {
                entries[index].use.add(warm_weight * rate, n_tokens_seen);
                wanted.emplace_back(rate, index);
            }
        }
    }
    std::stable_sort(wanted.begin(), wanted.end(), [](const auto & a, const auto & b) { return a.first > b.first; });
    std::vector<size_t> n_room; // for more hot experts, by class
    for (int i = 0; is_static && i < static_cast<int>(pools.size()); ++i) {
        const size_t n_max = n_hot_max(i, n_live(i));
        n_room.push_back(n_max - std::min(n_max, hot_entries(i).size()));
    }
    for (const auto & [rate, index] : wanted) {
        if (is_static && !entries[index].hot) {
            size_t & left = n_room[class_of_entry(index)];
            if (left == 0) {
                continue;
            }
            entries[index].hot = true;
            --left;
        }
        prefetch_one(index, S2MOE_PRIORITY_WARMUP);
    }
    reader->wake();
}

void expert_cache::set_trace(int64_t n_max) {
    const std::lock_guard lock(mutex);
    n_trace_max = n_max;
    trace.clear();
}

int64_t expert_cache::take_trace(std::span<s2moe_expert_trace> records) {
    const std::lock_guard lock(mutex);
    const auto n = std::min(records.size(), trace.size());
    std::copy_n(trace.begin(), n, records.begin());
    trace.erase(trace.begin(), trace.begin() + static_cast<int64_t>(n));
    return static_cast<int64_t>(n);
}

double expert_cache::measure(uint64_t n_bytes) {
    return measure_drive(layout, files, reader->name(), queue_depth, n_bytes);
}

} // namespace s2moe

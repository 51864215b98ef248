// The expert cache: which experts are in memory, which are on their way, and which give way.
//
// Threads: a decode's compute threads, the reader's threads, and any number that ask or prefetch. One mutex guards all
// bookkeeping; what a compute thread waits on is atomic. A reader's thread never waits for a compute thread.
//
// A part of a slot goes through these states:
//
//   empty ──request──▶ queued ──take()──▶ reading ──landed()──▶ raw ──first use──▶ packed
//
// "raw" is the file's layout. The compute threads bring a part into the kernels' layout themselves, in place, each
// just before it multiplies the rows, so that a part is touched while it is in the caches and no third copy exists.

#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "layout.h"
#include "reader.h"
#include "replacement.h"
#include "s2moe.h"

namespace s2moe {

class gate_device;

struct cache_options {
    std::string io = "auto";
    std::string reader = "auto";
    int queue_depth = 8;
    std::string policy = "cache"; // or "static": what warm() names stays for ever, all else for one layer's pass
};

// What a decode may do, and how it counts.
enum class decode_kind {
    by_width, // up to 8 tokens are a decode, more a prompt
    verify,   // a decode, whatever its width
    draft     // uses what is resident and counts the rest as zero; reads, waits and remembers nothing
};

// Faster memory above the cache, from which experts are computed; the cache then only feeds it. Entries are
// layer_index * n_expert_max() + expert.
class upper_tier {
  public:
    virtual ~upper_tier() = default;

    // Before and after a decode, which has been computed to its end.
    virtual void begin_decode(decode_kind kind) = 0;
    virtual void end_decode() = 0;

    // enum s2moe_residency. Takes no lock.
    virtual uint8_t residency(uint32_t entry) const = 0;

    // Fetches what the cache has of these. Between decodes; the cache's mutex is free.
    virtual void promote(std::span<const uint32_t> entries) = 0;

    // From now on these give way after all others.
    virtual void keep(std::span<const uint32_t> entries) = 0;

    virtual void stats(s2moe_device_stats & result) const = 0;

    // Counts one more time that the host waited for the device in a decode of few tokens.
    virtual void note_synchronization() = 0;

    // See create_host_gate() in gate_device.h.
    virtual std::unique_ptr<gate_device> create_gate(int n_layer, int n_expert, int n_ids) = 0;
};

// Slots that lie one behind the other.
struct slot_area {
    std::span<std::byte> bytes;
    uint64_t slot_bytes = 0;
};

// Whether a batch counts as a prompt.
constexpr bool is_prompt(decode_kind kind, int n_tokens) {
    return n_tokens > 8 && kind != decode_kind::verify;
}

constexpr s2moe_phase phase_of(decode_kind kind, int n_tokens) {
    return is_prompt(kind, n_tokens) ? S2MOE_PHASE_PREFILL : S2MOE_PHASE_DECODE;
}

// One expert of a running matrix multiplication.
struct op_expert {
    int expert = 0;
    int n_rows = 0;             // rows of the batch that it multiplies
    std::byte * data = nullptr; // nullptr: not there, and no wait for it: count the matrix as zero
    bool raw = false;           // not yet in the kernels' layout
    uint32_t slot = 0;
};

class expert_cache final : private read_source {
  public:
    expert_cache(expert_layout layout, const cache_options & options);
    ~expert_cache();

    // memory; none during a decode

    void allocate(uint64_t capacity_bytes);
    uint64_t shrink(uint64_t capacity_bytes);
    uint64_t grow(uint64_t capacity_bytes);
    uint64_t floor_bytes() const;

    // the compute threads, in this order

    void begin_decode(decode_kind kind = decode_kind::by_width);

    // Thread 0: the experts that part `part` of the layer will multiply, `n_rows[e]` rows for expert e, from a batch of
    // n_tokens. Fetches what is missing. Ids out of range must have been refused by fail().
    void begin_op(int layer_index, int part, std::span<const int32_t> n_rows, int n_tokens);

    // Any thread, after begin_op(): number of experts of the op, and the i-th of them in the order of their arrival;
    // waits for it.
    int n_op_experts() const {
        return op.n_total;
    }
    const op_expert & wait_expert(int i);

    // Thread 0, instead of begin_op(): the op computes nothing and the decode fails.
    void abandon_op(const char * why);

    // Hands out the work of an op: consecutive numbers from 0.
    uint32_t next_chunk() {
        return op.next_chunk.fetch_add(1, std::memory_order_relaxed);
    }

    // Thread 0, after its last chunk.
    void end_op();

    // Ends a decode. Throws failure when a read failed meanwhile; what was computed is then worthless.
    void end_decode();

    bool failed() const {
        return decode_failed.load(std::memory_order_acquire);
    }
    void fail(s2moe_status status, const std::string & message);
    void set_thread_count(int n) {
        n_threads = n;
    }

    // everybody

    const expert_layout layout;
    int layer_index(int layer) const; // -1: has no experts here
    std::string reader_json() const;
    void stats(s2moe_expert_stats & result) const;
    void residency(int layer_index, std::span<uint8_t> mask) const;
    void residency(std::span<uint8_t> mask) const; // of all: [layer_index * n_expert_max() + expert]
    int prefetch(std::span<const s2moe_expert_id> ids, s2moe_priority priority);
    int cancel_prefetches();
    void pin(std::span<const s2moe_expert_id> ids);
    s2moe_expert_costs costs() const;

    // an upper tier

    // nullptr: there is none any more. While there is one, capacity stays as it is, and lookups are its lookups. Throws
    // failure before allocate() and with the policy "static".
    void join(upper_tier * tier);

    // The memory of all slots, by class.
    std::vector<slot_area> areas() const;

    // The tensor of the model whose experts are part `part` of the layer; nullptr while no model is loaded.
    void note_tensor(int layer_index, int part, const ggml_tensor * tensor);
    const ggml_tensor * tensor(int layer_index, int part) const;

    // If all of the expert is in memory: keeps it there until unhold(), and returns where its parts are.
    bool hold(uint32_t entry, std::span<std::byte *> parts);
    void unhold(uint32_t entry);

    // Counts uses that the upper tier served.
    void note_uses(uint32_t entry, uint64_t n_rows);

    // The gate where the upper tier computes; nullptr while there is none. Its user counts how often it waits.
    std::unique_ptr<gate_device> create_gate(int n_layer, int n_expert, int n_ids) const;
    void note_synchronization();

    // Of the upper tier; zeros while there is none.
    void device_stats(s2moe_device_stats & result) const;

    // Experts in the memory that computes them.
    uint64_t n_at_hand() const;

    int n_expert_max() const {
        return n_expert;
    }
    void counts(std::span<uint64_t> result) const;
    void warm(std::span<const uint64_t> counts);
    void set_trace(int64_t n_max);
    int64_t take_trace(std::span<s2moe_expert_trace> records);
    double measure(uint64_t n_bytes);

  private:
    static constexpr uint32_t no_slot = UINT32_MAX;
    static constexpr int n_parts_max = 4;

    enum class part_state : uint8_t { empty, queued, reading, raw, packed };

    // What is known of an expert, resident or not.
    struct entry {
        uint32_t slot = no_slot;
        bool prefetched = false; // came by a prefetch and has not been used since
        bool pinned = false;     // by pin()
        bool hot = false;        // policy "static": stays in its slot
        uint64_t n_used = 0;     // by decode
        int64_t kept_until = 0;  // decode until which an unused prefetch is not evicted
        usefulness use;
    };

    struct slot {
        uint32_t owner = no_slot; // index in `entries`
        uint32_t generation = 0;  // grows with each owner
        int n_reading = 0;
        bool held = false;    // by hold()
        int n_missing = 0;    // parts that are not in memory yet
        bool broken = false;  // a read failed
        bool in_pass = false; // needed by the layer that is being computed
        bool counted = false; // among the resident
        bool retired = false; // given back by shrink()
        s2moe_trigger trigger = S2MOE_TRIGGER_DEMAND;
        std::chrono::steady_clock::time_point requested;
        std::array<part_state, n_parts_max> parts = {};
    };

    // The slots of a class, one after the other in a mapping.
    struct pool {
        std::byte * base = nullptr;
        uint64_t mapped_bytes = 0;
        uint32_t first = 0; // index of its first slot in `slots`
        uint32_t n_slots = 0;
        std::vector<uint32_t> free;
    };

    struct queued_read {
        uint32_t slot;
        uint32_t generation;
        int part;
    };

    // The layer that is being computed: begins with its first op.
    struct pass {
        int layer_index = -1;
        uint32_t parts_seen = 0;
        bool prefill = false;
        std::vector<uint32_t> slots;
        s2moe_expert_trace trace = {};
    };

    struct op_state {
        int layer_index = 0;
        int part = 0;
        int n_total = 0;
        bool open = false;
        std::vector<op_expert> experts; // by arrival; the first n_ready are read without the mutex
        std::vector<op_expert> waiting;
        std::atomic<int> n_ready = 0;
        std::atomic<uint32_t> next_chunk = 0;
        std::atomic<int64_t> waited_ns = 0; // by all threads
        std::chrono::steady_clock::time_point begun;
        std::chrono::steady_clock::time_point ended;
    };

    // read_source
    bool take(read_request & request) override;
    void landed(const read_request & request, int error) override;
    void reader_died(int error) override;

    // all below: the mutex is held
    bool take_from(std::deque<queued_read> & queue, read_request & request);
    void close_op();
    void note_reads(std::chrono::steady_clock::time_point now);
    void fail_reader();
    void fail_locked(s2moe_status status, const std::string & message);
    void
    begin_pass(int layer_index, std::span<const int32_t> n_rows, int n_tokens, std::unique_lock<std::mutex> & lock);
    void begin_draft_pass(int layer_index, std::span<const int32_t> n_rows);
    void end_pass();
    void read_ahead(int layer_index);
    uint32_t demand_slot(int slot_class, std::unique_lock<std::mutex> & lock);
    uint32_t take_free(int slot_class);
    uint32_t find_victim(const pool & pool, bool also_pinned) const;
    uint32_t n_hot_max(int slot_class, uint32_t n_slots) const;
    uint32_t n_live(int slot_class) const;
    uint64_t count_slots();
    std::vector<uint32_t> hot_entries(int slot_class) const;
    void cool(int slot_class, uint32_t n_max);
    void give_up(uint32_t slot);
    bool prefetch_one(uint32_t entry, s2moe_priority priority);
    int prefetch_entries(std::span<const uint32_t> wanted, s2moe_priority priority);
    bool is_above(uint32_t entry) const; // in the upper tier, or on its way there
    void deliver(op_expert expert);
    void drain(std::unique_lock<std::mutex> & lock);
    void assign(uint32_t slot, uint32_t entry, s2moe_trigger trigger);
    void enqueue(uint32_t slot, s2moe_trigger trigger);
    void release(uint32_t slot, bool count_eviction);
    void whole_slot_landed(slot & slot);
    std::byte * part_base(uint32_t slot, int part) const;
    std::byte * part_data(uint32_t slot, int part) const;
    uint64_t part_offset(uint32_t entry, int part) const;
    s2moe_residency residency_of(uint32_t entry) const;
    void build_read(const queued_read & queued, read_request & request) const;
    int class_of_entry(uint32_t entry) const {
        return layer_of_entry(entry).slot_class;
    }
    int class_of_slot(uint32_t slot) const;
    const expert_layer & layer_of_entry(uint32_t entry) const {
        return layout.layers[entry / n_expert];
    }
    void populate(std::byte * base, uint64_t n_bytes);
    void stop_population();
    uint32_t entry_of(const s2moe_expert_id & id) const;
    void free_pools();

    int n_expert = 0; // of the largest layer: entries of a layer are n_expert apart
    const int queue_depth;
    const bool is_static; // the policy. In each class hot experts leave the slots of one layer free, which are given up
                          // when a pass ends: so a demand always finds one, and nothing is ever evicted
    std::atomic<int> n_threads = 1;

    mutable std::mutex mutex;
    std::condition_variable slot_freed;
    std::vector<entry> entries; // [layer_index * n_expert + expert]
    std::vector<slot> slots;
    std::vector<pool> pools; // by class
    std::array<std::deque<queued_read>, S2MOE_N_TRIGGERS> queues;
    int n_reading = 0;
    pass current;
    decode_kind kind = decode_kind::by_width;
    op_state op;
    std::atomic<upper_tier *> upper = nullptr;
    std::vector<std::array<const ggml_tensor *, n_parts_max>> tensors; // [layer_index][part]
    int64_t clock = 0;                                                 // decodes so far
    int64_t n_tokens_seen = 0;                                         // by them; a prompt's batch counts as one
    int ahead_index = -1; // layer that is being read ahead of a prompt: its experts stay
    int reader_error = 0; // errno: there is no reader any more
    std::atomic<bool> decode_failed = false;
    s2moe_status failure_status = S2MOE_OK;
    std::string failure_message;

    s2moe_expert_stats totals = {};
    std::chrono::steady_clock::time_point busy_since;
    uint64_t busy_bytes = 0;
    double bytes_per_second = 0;
    double hit_seconds = 0;
    std::deque<s2moe_expert_trace> trace;
    int64_t n_trace_max = 0;

    std::atomic<uint64_t> touched_bytes = 0;
    std::atomic<bool> stop_populating = false;
    std::thread populating; // touches the pools' memory
    bool populated = true;
    std::condition_variable population_ended;

    model_files files;
    std::string reader_reason;
    std::unique_ptr<expert_reader> reader; // last: its threads use all of the above
};

} // namespace s2moe

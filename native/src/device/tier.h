// A tier of slots in a GPU's memory above the expert cache in the host's: experts are computed from slots only, and
// what has no slot comes from the cache, which reads it from the drive if it must.
//
// A decode's kernels wait for no host while every expert has a slot. Where one has none, the kernel that maps ids to
// slots leaves a request in the mailbox; the tier's thread fetches the experts through the cache, names slots for them,
// and the kernel goes on, copying them itself over the bus. So slots change their experts only while the GPU stands
// still: in an answer, or between decodes, when promote() copies predicted experts beside the next computation.
//
// Locks: the tier's mutex, then the cache's; never the other way round.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "device/memory.h"
#include "device/slots.h"
#include "experts/cache.h"
#include "ggml-cpp.h"
#include "remap_rule.h"

namespace s2moe {

class device_tier final : public upper_tier {
  public:
    /*
     * Takes all the memory it will use, and joins the cache, which must have its slots. Until the tier is gone the
     * cache's capacity stays as it is.
     *
     *   capacity_bytes  for slots; see plan_slots()
     */
    device_tier(expert_cache & cache, std::unique_ptr<device_memory> device, uint64_t capacity_bytes);
    ~device_tier();

    // Has the context's graphs compute experts from the slots. The context must be gone, or detached, before the tier.
    void attach(llama_context * ctx);

    void begin_decode(decode_kind kind) override;
    void end_decode() override;
    uint8_t residency(uint32_t entry) const override {
        return states[entry].load(std::memory_order_relaxed);
    }
    void promote(std::span<const uint32_t> entries) override;
    void keep(std::span<const uint32_t> entries) override;
    void stats(s2moe_device_stats & result) const override;
    void note_synchronization() override;
    std::unique_ptr<gate_device> create_gate(int n_layer, int n_expert_in_layer, int n_ids) override {
        return device->create_gate(n_layer, n_expert_in_layer, n_ids);
    }

    std::string to_json() const;

    // For the operation of device_memory::remap().
    const remap_state & kernel_state() const {
        return state;
    }
    remap_call call_of(const ggml_tensor * op, const llama_moe_slot_layer & layer) const;
    device_memory & memory() const {
        return *device;
    }
    void fail(const std::string & message) {
        cache.fail(S2MOE_ERROR_INTERNAL, message);
    }

  private:
    using steady = std::chrono::steady_clock;

    enum class lookup : uint8_t { hit, missed, prefetched };

    // An expert on its way into its slot beside the computation.
    struct flight {
        uint32_t entry = 0;
        uint64_t mark = 0;
    };

    // Memory of the cache that the device reads where it is.
    struct area {
        std::span<std::byte> host;
        const std::byte * device = nullptr;
    };

    void make_stacks();
    void share_memory();
    void pin_cache();
    void leave_cache();
    void serve();

    // all below: the mutex is held
    void answer(uint32_t request);
    void fetch_layer();
    void fetch_missing(int layer, std::span<const int32_t> n_rows);
    bool place(uint32_t entry);
    void await_flight(uint32_t entry);
    void land();
    void land_all();
    void wait_for(uint64_t mark);
    void touch_down(const flight & landed);
    void launch(uint32_t entry, std::span<std::byte * const> parts);
    void change(uint32_t entry);
    void upload(size_t n_bytes);
    void tell_changes();
    std::byte * slot_address(uint32_t entry, int part) const;
    const std::byte * reachable(const std::byte * data, uint64_t n_bytes);
    const expert_layer & layer_of(uint32_t entry) const {
        return cache.layout.layers[entry / n_expert];
    }

    expert_cache & cache;
    const std::unique_ptr<device_memory> device;
    const int n_expert; // columns of the table
    slot_map slots;

    ggml_context_ptr tensors;
    std::vector<ggml_backend_buffer_ptr> buffers;
    std::vector<std::vector<ggml_tensor *>> stacks; // by group, by part; the last matrix is zero
    std::vector<llama_moe_slot_layer> layers;       // as the cache's

    device_memory::memory kernel_memory; // control, then the table
    device_memory::memory shared;        // the mailbox, then n_rows
    remap_state state;
    std::vector<area> areas;
    device_memory::memory staging; // for a layer's experts, where not all areas are pinned
    uint64_t staging_bytes = 0;
    std::string unpinned_reason; // of an area that could not be pinned
    uint64_t n_staged = 0;       // bytes, by this answer

    mutable std::mutex mutex;
    std::condition_variable woken;
    std::vector<std::byte> image;             // of kernel_memory between decodes
    bool is_stale = true;                     // the device has another table
    std::vector<uint32_t> changed;            // entries that this answer gave other slots, or none
    int n_uploads = 0;                        // for this decode
    uint64_t n_synchronizations_seen = 0;     // of the device's
    int copy_phase = S2MOE_PHASE_PREFILL;     // of the last answer with fetches
    std::vector<std::atomic<uint8_t>> states; // enum s2moe_residency, by entry
    std::vector<lookup> lookups;              // of this decode, by entry
    std::vector<flight> flights;
    decode_kind kind = decode_kind::by_width;
    int n_tokens_asked = 0; // of this decode: of the widest layer that asked
    int64_t n_tokens_seen = 0;
    uint32_t n_answered = 0;
    std::atomic<bool> running = false;
    bool stopping = false;
    s2moe_device_stats totals = {};

    std::thread server;
};

} // namespace s2moe

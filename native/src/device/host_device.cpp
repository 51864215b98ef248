// The CPU in the place of a GPU: the tier with the same protocol and rules, slots in plain memory.

#include <atomic>
#include <chrono>
#include <cstring>
#include <new>

#include "device/memory.h"
#include "device/tier.h"
#include "error.h"
#include "experts/barrier.h"
#include "ggml-cpu.h"
#include "remap_rule.h"

namespace s2moe {

namespace {

constexpr std::align_val_t alignment{64};

uint64_t now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

class host_device final : public device_memory {
  public:
    explicit host_device(host_abilities abilities) : abilities(abilities) {
    }
    const char * name() const override {
        return "CPU";
    }
    ggml_backend_buffer_type_t slot_buffer_type() const override {
        return ggml_backend_cpu_buffer_type();
    }
    bool is_unified() const override {
        return true;
    }
    uint64_t piece_bytes() const override {
        return piece_limit;
    }
    bool has_watchdog() const override {
        return abilities.has_watchdog;
    }
    uint64_t n_synchronizations() const override {
        return n_graphs; // their ends
    }
    memory allocate(uint64_t n_bytes) override {
        auto * data = static_cast<std::byte *>(::operator new(n_bytes, alignment));
        std::memset(data, 0, n_bytes);
        return {data, [](std::byte * each) { ::operator delete(each, alignment); }};
    }
    memory allocate_shared(uint64_t n_bytes) override {
        return allocate(n_bytes);
    }

    const std::byte * pin(std::span<std::byte> area, std::string * reason) override {
        if (abilities.n_pins == 0) {
            *reason = "it was told not to";
            return nullptr;
        }
        --abilities.n_pins;
        return area.data();
    }
    void unpin(std::span<std::byte>) noexcept override {
    }
    void write(std::byte * to, const void * from, uint64_t n_bytes) override {
        std::memcpy(to, from, n_bytes);
        release_to_others(); // to the threads that will compute
    }
    void copy(std::byte * to, const std::byte * from, uint64_t n_bytes) override {
        if (abilities.n_copies_until-- == 0) {
            throw failure(S2MOE_ERROR_INTERNAL, "it was told to fail a copy");
        }
        std::memcpy(to, from, n_bytes);
        release_to_others();
    }

    // A copy seems to take until the second question, so that tests find experts on their way.
    uint64_t mark() override {
        return ++n_marks;
    }
    bool passed(uint64_t mark) override {
        if (mark > n_asked) {
            n_asked = mark;
            return false;
        }
        return true;
    }
    void finish_copies() noexcept override {
    }
    std::unique_ptr<gate_device> create_gate(int n_layer, int n_expert, int n_ids) override {
        return create_host_gate(n_layer, n_expert, n_ids);
    }
    ggml_custom_op_t remap() const override {
        return map_ids;
    }

  private:
    static void map_ids(ggml_tensor * dst, int ith, int nth, void * userdata);

    static constexpr uint64_t piece_limit = 256 * 1024; // small models' stacks come in several pieces, too
    host_abilities abilities;
    std::atomic<uint64_t> n_graphs = 0; // whose first layer was computed
    uint64_t n_marks = 0;
    uint64_t n_asked = 0;
};

void host_device::map_ids(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return; // ggml calls every thread
    }
    acquire_from_others();
    const auto & layer = *static_cast<const llama_moe_slot_layer *>(userdata);
    const auto & tier = *static_cast<const device_tier *>(layer.owner);
    const remap_state & state = tier.kernel_state();
    one_lane lanes;
    remap_memory memory;
    remap_layer(lanes, state, tier.call_of(dst, layer), memory);
    if (state.control->n_fetches > 0) {
        state.timer->begin = now();
        fetch_slots(state, 0, 1);
        state.timer->end = now();
    }
    static_cast<host_device &>(tier.memory()).n_graphs += layer.index == 0;
    release_to_others();
}

} // namespace

std::unique_ptr<device_memory> create_host_device(host_abilities abilities) {
    return std::make_unique<host_device>(abilities);
}

} // namespace s2moe

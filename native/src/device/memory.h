// What the tier of slots needs of a GPU: its memory, memory that both sides reach, and copies beside the computation.

#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "ggml-backend.h"
#include "llama-moe.h"
#include "speculation/gate_device.h"

namespace s2moe {

// Functions throw `failure` with what the driver said, unless they tell otherwise. Any thread may call them, but while
// a kernel waits for the host only passed(): the driver may hold its locks until that kernel has ended.
class device_memory {
  public:
    virtual ~device_memory() = default;

    virtual const char * name() const = 0;

    // Where slots go: ggml's own, so that its kernels compute from them.
    virtual ggml_backend_buffer_type_t slot_buffer_type() const = 0;

    // Whether host and device share their memory.
    virtual bool is_unified() const = 0;

    // The largest piece of memory to ask for, or to pin, at once.
    virtual uint64_t piece_bytes() const = 0;

    // Whether the driver ends kernels that run too long, such as those that wait for a slow drive.
    virtual bool has_watchdog() const = 0;

    // Times so far that ggml has waited for the device, if it is one.
    virtual uint64_t n_synchronizations() const = 0;

    using memory = std::unique_ptr<std::byte, std::function<void(std::byte *)>>;

    // Zeroed. Of the device; and reached by both sides at one address.
    virtual memory allocate(uint64_t n_bytes) = 0;
    virtual memory allocate_shared(uint64_t n_bytes) = 0;

    // Lets the device read `area` of the host where it is; returns the device's address of it, or nullptr and why it
    // cannot. Until unpin() its pages must stay.
    virtual const std::byte * pin(std::span<std::byte> area, std::string * reason) = 0;
    virtual void unpin(std::span<std::byte> area) noexcept = 0;

    // Between decodes; complete when it returns.
    virtual void write(std::byte * to, const void * from, uint64_t n_bytes) = 0;

    // Beside the computation; `from` may be pinned memory or not, and must stay until the mark is passed.
    virtual void copy(std::byte * to, const std::byte * from, uint64_t n_bytes) = 0;
    virtual uint64_t mark() = 0; // after the copies so far
    virtual bool passed(uint64_t mark) = 0;
    virtual void finish_copies() noexcept = 0; // what can be; between decodes

    // The gate on the same device.
    virtual std::unique_ptr<gate_device> create_gate(int n_layer, int n_expert, int n_ids) = 0;

    // The operation that maps ids to slots: what to put into the graph for it. userdata: llama_moe_slot_layer, whose
    // owner is a device_tier.
    virtual ggml_custom_op_t remap() const = 0;
};

// What the CPU in the place of a GPU can do.
struct host_abilities {
    int n_pins = INT_MAX;    // areas that pin() takes
    int n_copies_until = -1; // a copy beside the computation that fails after so many; negative: none does
    bool has_watchdog = false;
};

// The CPU in the place of a GPU: the same tier, protocol and rule, with ggml's plain CPU kernels. For tests.
std::unique_ptr<device_memory> create_host_device(host_abilities abilities);

// In builds with CUDA. device: its number. Throws failure if it cannot be used.
std::unique_ptr<device_memory> create_cuda_device(int device);

} // namespace s2moe

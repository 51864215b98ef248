#include "measure.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <vector>

#include "error.h"

namespace s2moe {

namespace {

// Reads random experts into buffers of its own.
class measuring_source final : public read_source {
  public:
    measuring_source(const expert_layout & layout, uint64_t n_bytes, int queue_depth) : layout(layout), left(n_bytes) {
        uint64_t largest = 0;
        for (const expert_layer & layer : layout.layers) {
            for (const expert_part & part : layer.parts) {
                largest = std::max(largest, slot_part_bytes(part.bytes));
            }
        }
        for (int i = 0; i < queue_depth; ++i) {
            buffers.emplace_back(static_cast<std::byte *>(std::aligned_alloc(io_alignment, largest)), &std::free);
            if (buffers.back() == nullptr) {
                throw std::bad_alloc();
            }
            std::memset(buffers.back().get(), 0, largest); // page faults are not the drive's
            free.push_back(i);
        }
    }

    bool take(read_request & request) override {
        const std::lock_guard lock(mutex);
        if (left == 0 || error != 0 || free.empty()) {
            return false;
        }
        const auto & layer = layout.layers[random() % layout.layers.size()];
        const auto & part = layer.parts[random() % layer.parts.size()];
        const uint64_t begin = part.offset + random() % layer.n_expert * part.bytes;
        request.file = part.file;
        request.offset = begin / io_alignment * io_alignment;
        request.n_needed = begin + part.bytes - request.offset;
        request.n_bytes = (request.n_needed + io_alignment - 1) / io_alignment * io_alignment;
        request.tag = free.back();
        request.to = buffers[free.back()].get();
        free.pop_back();
        left -= std::min(left, request.n_bytes);
        ++n_reading;
        return true;
    }

    void reader_died(int read_error) override {
        const std::lock_guard lock(mutex);
        error = read_error;
        n_reading = 0;
        changed.notify_all();
    }

    void landed(const read_request & request, int read_error) override {
        const std::lock_guard lock(mutex);
        free.push_back(static_cast<int>(request.tag));
        n_done_bytes += request.n_bytes;
        error = read_error != 0 ? read_error : error;
        --n_reading;
        changed.notify_all();
    }

    // Waits for the end; returns the bytes read, or throws.
    uint64_t finish() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return n_reading == 0 && (left == 0 || error != 0); });
        if (error != 0) {
            throw failure(S2MOE_ERROR_IO,
                          "measuring the drive of " + layout.files[0].path + ": " + std::strerror(error));
        }
        return n_done_bytes;
    }

  private:
    const expert_layout & layout;
    std::mutex mutex;
    std::condition_variable changed;
    std::minstd_rand random;
    std::vector<std::unique_ptr<std::byte, decltype(&std::free)>> buffers;
    std::vector<int> free;
    uint64_t left;
    uint64_t n_done_bytes = 0;
    int n_reading = 0;
    int error = 0;
};

} // namespace

double measure_drive(
    const expert_layout & layout, model_files & files, const char * reader_kind, int queue_depth, uint64_t n_bytes) {
    measuring_source source(layout, n_bytes, queue_depth);
    std::string reason;
    const auto reader = expert_reader::create(reader_kind, queue_depth, files, source, &reason);
    const auto begun = std::chrono::steady_clock::now();
    reader->wake();
    const uint64_t n_read = source.finish();
    return static_cast<double>(n_read) /
           std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

} // namespace s2moe

// Reads with io_uring: one thread, woken through an eventfd that the ring itself watches.

#include "reader.h"

#if S2MOE_IO_URING

#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>

namespace s2moe {

namespace {

constexpr int n_failures_max = 1000;

class uring_reader final : public expert_reader {
  public:
    uring_reader(int queue_depth, model_files & files, read_source & source)
        : files(files), source(source), slots(queue_depth) {
    }

    ~uring_reader() override {
        if (thread.joinable()) {
            stopping = true;
            wake();
            thread.join();
        }
        if (event >= 0) {
            close(event);
        }
        if (ring_made) {
            io_uring_queue_exit(&ring);
        }
    }

    // 0 or an errno
    int start() {
        event = eventfd(0, EFD_CLOEXEC);
        if (event < 0) {
            return errno;
        }
        const int error = io_uring_queue_init(static_cast<unsigned>(slots.size()) + 1, &ring, 0);
        if (error != 0) {
            return -error;
        }
        ring_made = true;
        io_uring_probe * probe = io_uring_get_probe_ring(&ring);
        const bool supported = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) != 0;
        io_uring_free_probe(probe);
        if (!supported) {
            return ENOSYS;
        }
        try {
            thread = std::thread([this] { run(); });
        } catch (const std::system_error & error) {
            return error.code().value();
        }
        return 0;
    }

    void wake() override {
        const uint64_t one = 1;
        while (write(event, &one, sizeof(one)) < 0 && errno == EINTR) {
        }
    }

    const char * name() const override {
        return "io_uring";
    }

  private:
    struct slot {
        read_request request;
        uint64_t done = 0;
        int n_retries = 0;
        bool busy = false;
    };

    void run() {
        watch_event();
        int n_failures = 0; // in a row
        while (true) {
            if (!stopping) {
                start_reads();
            }
            if (stopping && n_busy == 0) {
                return; // the ring's end cancels the read of the eventfd
            }
            const int result = io_uring_submit_and_wait(&ring, 1);
            n_failures = result < 0 && result != -EINTR ? n_failures + 1 : 0;
            if (n_failures > n_failures_max) {
                source.reader_died(-result); // what is in flight may still be written to: it stays taken
                return;
            }
            if (n_failures > 0) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1)); // memory may be short for a moment
            }
            reap();
        }
    }

    void watch_event() {
        io_uring_sqe * entry = io_uring_get_sqe(&ring);
        io_uring_prep_read(entry, event, &event_value, sizeof(event_value), 0);
        io_uring_sqe_set_data(entry, nullptr);
    }

    void start_reads() {
        for (slot & each : slots) {
            if (each.busy) {
                continue;
            }
            if (!source.take(each.request)) {
                return;
            }
            each.busy = true;
            each.done = 0;
            each.n_retries = 0;
            ++n_busy;
            submit(each);
        }
    }

    void submit(slot & each) {
        const read_request & request = each.request;
        io_uring_sqe * entry = io_uring_get_sqe(&ring); // never empty: there are as many entries as slots and events
        io_uring_prep_read(entry,
                           files.descriptor(request.file),
                           request.to + each.done,
                           static_cast<unsigned>(request.n_bytes - each.done),
                           request.offset + each.done);
        io_uring_sqe_set_data(entry, &each);
    }

    void reap() {
        io_uring_cqe * completion = nullptr;
        while (io_uring_peek_cqe(&ring, &completion) == 0 && completion != nullptr) {
            auto * each = static_cast<slot *>(io_uring_cqe_get_data(completion));
            const int64_t result = completion->res;
            io_uring_cqe_seen(&ring, completion);
            if (each == nullptr) {
                watch_event();
            } else {
                finish(*each, result);
            }
        }
    }

    void finish(slot & each, int64_t result) {
        const int error = files.progress(each.request, result, each.done);
        if (error == EAGAIN && each.n_retries++ < retries_max) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            submit(each);
            return;
        }
        if (error < 0) {
            submit(each);
            return;
        }
        each.busy = false;
        --n_busy;
        source.landed(each.request, error);
    }

    model_files & files;
    read_source & source;
    std::vector<slot> slots;
    int n_busy = 0;
    int event = -1;
    uint64_t event_value = 0;
    io_uring ring = {};
    bool ring_made = false;
    std::atomic<bool> stopping = false;
    std::thread thread;
};

} // namespace

std::unique_ptr<expert_reader>
create_uring_reader(int queue_depth, model_files & files, read_source & source, std::string * reason) {
    auto reader = std::make_unique<uring_reader>(queue_depth, files, source);
    if (const int error = reader->start(); error != 0) {
        *reason = std::string("the kernel does not allow io_uring (") + std::strerror(error) + ")";
        return nullptr;
    }
    return reader;
}

} // namespace s2moe

#else

namespace s2moe {

std::unique_ptr<expert_reader> create_uring_reader(int, model_files &, read_source &, std::string * reason) {
    *reason = "this build has no liburing";
    return nullptr;
}

} // namespace s2moe

#endif

// Reads with a pool of threads, each in pread(): works everywhere.

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "error.h"
#include "reader.h"

namespace s2moe {

namespace {

constexpr int n_threads_max = 4; // two already saturate common drives with reads of half a megabyte

class thread_reader final : public expert_reader {
  public:
    thread_reader(int n_threads, model_files & files, read_source & source) : files(files), source(source) {
        try {
            for (int i = 0; i < n_threads; ++i) {
                threads.emplace_back([this] { run(); });
            }
        } catch (const std::system_error & error) {
            if (threads.empty()) { // one is enough
                throw failure(S2MOE_ERROR_UNSUPPORTED, std::string("cannot start a reading thread: ") + error.what());
            }
        }
    }

    ~thread_reader() override {
        {
            const std::lock_guard lock(mutex);
            stopping = true;
        }
        changed.notify_all();
        for (std::thread & thread : threads) {
            thread.join();
        }
    }

    void wake() override {
        {
            const std::lock_guard lock(mutex);
            ++n_wakes;
        }
        changed.notify_all();
    }

    const char * name() const override {
        return "threads";
    }

  private:
    void run() {
        uint64_t n_seen = 0;
        while (true) {
            read_request request;
            while (source.take(request)) {
                source.landed(request, read(request));
            }
            std::unique_lock lock(mutex);
            changed.wait(lock, [&] { return stopping || n_wakes != n_seen; });
            if (stopping) {
                return;
            }
            n_seen = n_wakes;
        }
    }

    int read(const read_request & request) const {
        uint64_t done = 0;
        int n_retries = 0;
        while (true) {
            const ssize_t result = pread(files.descriptor(request.file),
                                         request.to + done,
                                         request.n_bytes - done,
                                         static_cast<off_t>(request.offset + done));
            const int error = files.progress(request, result < 0 ? -errno : result, done);
            if (error == EAGAIN && n_retries++ < retries_max) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
                continue;
            }
            if (error >= 0) {
                return error;
            }
        }
    }

    model_files & files;
    read_source & source;
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t n_wakes = 0;
    bool stopping = false;
    std::vector<std::thread> threads;
};

} // namespace

std::unique_ptr<expert_reader> create_thread_reader(int queue_depth, model_files & files, read_source & source) {
    return std::make_unique<thread_reader>(std::clamp(queue_depth, 1, n_threads_max), files, source);
}

} // namespace s2moe

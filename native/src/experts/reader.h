// Reads from the model's files, several at a time, on threads of its own.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "layout.h"

namespace s2moe {

// How often a read that the system asks to try again is tried again, a millisecond apart.
constexpr int retries_max = 100;

// One read; offset, n_bytes and to are multiples of io_alignment.
struct read_request {
    int file = 0;
    uint64_t offset = 0;
    uint64_t n_bytes = 0;
    uint64_t n_needed = 0; // fewer bytes than this are an error; the rest may lie past the end of the file
    std::byte * to = nullptr;
    uint64_t tag = 0; // of the source
};

// Decides what is read next and learns what has been read. Called by the reader's threads.
class read_source {
  public:
    // The next read, or false when there is none that may start now.
    virtual bool take(read_request & request) = 0;

    // A read that take() gave is over. error: 0, or an errno; ENODATA: the file is too short, ESTALE: it was changed.
    virtual void landed(const read_request & request, int error) = 0;

    // Reads that take() gave will never be over, and no more will be made: the kernel's interface failed with this
    // errno.
    virtual void reader_died(int error) = 0;

  protected:
    ~read_source() = default;
};

// The open files of a model.
class model_files {
  public:
    // Opens all. io: "auto" (direct where it works), "direct" or "buffered". Throws failure: S2MOE_ERROR_IO, or
    // S2MOE_ERROR_UNSUPPORTED when "direct" does not work.
    model_files(const std::vector<model_file> & files, const std::string & io);
    ~model_files();
    model_files(const model_files &) = delete;
    model_files & operator=(const model_files &) = delete;

    int descriptor(int file) const {
        return files[file].descriptor;
    }

    // 0, or ESTALE when the file's length or time of change is not what it was.
    int check_unchanged(int file) const;

    // The errno of a read that is over, given what the system call returned; `done` grows by the bytes read.
    // Negative: not over, read the rest.
    int progress(const read_request & request, int64_t result, uint64_t & done) const;

    bool direct = false;
    std::string reason; // why not direct, "" if direct or not wanted

  private:
    struct open_file {
        int descriptor = -1;
        int64_t n_bytes = 0;
        int64_t seconds = 0, nanoseconds = 0; // of the last change
    };
    void open_all(const std::vector<model_file> & paths, int flags);
    void close_all();
    bool reads_work() const;

    std::vector<open_file> files;
};

class expert_reader {
  public:
    virtual ~expert_reader() = default;

    // The source has something to read. [any thread]
    virtual void wake() = 0;

    virtual const char * name() const = 0;

    // kind: "auto" (io_uring, else threads), "io_uring" or "threads"; queue_depth: reads in flight at most. Files and
    // source outlive the reader. *reason: why "auto" is not io_uring. Throws failure (S2MOE_ERROR_UNSUPPORTED).
    static std::unique_ptr<expert_reader>
    create(const std::string & kind, int queue_depth, model_files & files, read_source & source, std::string * reason);
};

// These return nullptr, and the reason, when the system does not allow it.
std::unique_ptr<expert_reader>
create_uring_reader(int queue_depth, model_files & files, read_source & source, std::string * reason);
std::unique_ptr<expert_reader> create_thread_reader(int queue_depth, model_files & files, read_source & source);

} // namespace s2moe

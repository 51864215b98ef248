#include "reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "error.h"

namespace s2moe {

model_files::model_files(const std::vector<model_file> & paths, const std::string & io) {
    if (io != "buffered") {
        try {
            open_all(paths, O_DIRECT);
            direct = reads_work();
        } catch (const failure &) {
            direct = false; // some file systems refuse O_DIRECT at once
        }
        if (direct) {
            return;
        }
        close_all();
        reason = "the file system does not support direct reads (O_DIRECT)";
    }
    open_all(paths, 0); // says what else may be wrong
    if (io == "direct") {
        close_all();
        throw failure(S2MOE_ERROR_UNSUPPORTED, paths[0].path + ": " + reason + "; use --io buffered");
    }
}

model_files::~model_files() {
    close_all();
}

void model_files::open_all(const std::vector<model_file> & paths, int flags) {
    for (const model_file & path : paths) {
        const int descriptor = open(path.path.c_str(), O_RDONLY | O_CLOEXEC | flags);
        struct stat info = {};
        if (descriptor < 0 || fstat(descriptor, &info) != 0) {
            const int error = errno;
            if (descriptor >= 0) {
                close(descriptor);
            }
            close_all();
            throw failure(S2MOE_ERROR_IO, path.path + ": " + std::strerror(error));
        }
        if (static_cast<uint64_t>(info.st_size) != path.bytes) {
            close(descriptor);
            close_all();
            throw failure(S2MOE_ERROR_IO, path.path + ": was changed while it was opened; start again");
        }
        files.push_back({descriptor, info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec});
    }
}

void model_files::close_all() {
    for (const open_file & file : files) {
        close(file.descriptor);
    }
    files.clear();
}

bool model_files::reads_work() const {
    void * block = std::aligned_alloc(io_alignment, io_alignment);
    bool works = block != nullptr;
    for (const open_file & file : files) {
        works = works && pread(file.descriptor, block, io_alignment, 0) > 0;
    }
    std::free(block);
    return works;
}

int model_files::check_unchanged(int file) const {
    const open_file & known = files[file];
    struct stat info = {};
    if (fstat(known.descriptor, &info) != 0) {
        return errno;
    }
    const bool same = info.st_size == known.n_bytes && info.st_mtim.tv_sec == known.seconds &&
                      info.st_mtim.tv_nsec == known.nanoseconds;
    return same ? 0 : ESTALE;
}

int model_files::progress(const read_request & request, int64_t result, uint64_t & done) const {
    if (result == -EINTR) {
        return -1;
    }
    if (result < 0) {
        return static_cast<int>(-result);
    }
    done += static_cast<uint64_t>(result);
    if (done >= request.n_needed) {
        return check_unchanged(request.file);
    }
    // a direct read that ends inside a block has met the end of the file
    return result == 0 || done % io_alignment != 0 ? ENODATA : -1;
}

std::unique_ptr<expert_reader> expert_reader::create(
    const std::string & kind, int queue_depth, model_files & files, read_source & source, std::string * reason) {
    reason->clear();
    if (kind != "threads") {
        if (auto reader = create_uring_reader(queue_depth, files, source, reason)) {
            return reader;
        }
        if (kind == "io_uring") {
            throw failure(S2MOE_ERROR_UNSUPPORTED, "io_uring: " + *reason + "; use --reader threads");
        }
    }
    return create_thread_reader(queue_depth, files, source);
}

} // namespace s2moe

/*
 * An LD_PRELOAD library that makes reads of files fail, come short or take long, on demand.
 *
 * The file named by S2MOE_FAULTS holds a struct faults, which the test changes through a shared mapping while the
 * process runs (fault_control.py). Without the variable nothing is changed. Reads by io_uring are system calls of
 * liburing's own, out of a preloaded library's reach: the tests make those fail in the kernel (fault_cases.py).
 */

#define _GNU_SOURCE

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct faults {
    int32_t read_errno;    /* reads fail with it; 0: they do not */
    int32_t n_spared;      /* this many succeed first */
    int32_t n_failing;     /* this many fail then, and all after them succeed; 0: all fail */
    int32_t short_bytes;   /* reads return at most so much; 0: all */
    int32_t delay_us;      /* before each read */
    int32_t refuse_direct; /* files cannot be opened with O_DIRECT */
    int32_t n_reads;       /* reads seen */
    int32_t n_faulty;      /* reads that were made to fail or came short */
};

static struct faults * faults = NULL;

__attribute__((constructor)) static void open_control(void) {
    const char * path = getenv("S2MOE_FAULTS");
    if (path == NULL) {
        return;
    }
    const int file = open(path, O_RDWR | O_CLOEXEC);
    void * shared =
        file < 0 ? MAP_FAILED : mmap(NULL, sizeof(struct faults), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) {
        abort();
    }
    close(file);
    faults = shared;
}

static void * next(const char * name) {
    void * function = dlsym(RTLD_NEXT, name);
    if (function == NULL) {
        abort();
    }
    return function;
}

/* Counts a read; 1 when it must fail. */
static int strikes(void) {
    if (faults == NULL) {
        return 0;
    }
    __atomic_add_fetch(&faults->n_reads, 1, __ATOMIC_SEQ_CST);
    if (faults->delay_us > 0) {
        usleep((useconds_t)faults->delay_us);
    }
    if (faults->read_errno == 0) {
        return 0;
    }
    const int32_t n_left = __atomic_fetch_sub(&faults->n_spared, 1, __ATOMIC_SEQ_CST);
    if (n_left > 0 || (faults->n_failing > 0 && n_left <= -faults->n_failing)) {
        return 0;
    }
    __atomic_add_fetch(&faults->n_faulty, 1, __ATOMIC_SEQ_CST);
    return 1;
}

static size_t shortened(size_t n_bytes) {
    if (faults == NULL || faults->short_bytes == 0 || n_bytes <= (size_t)faults->short_bytes) {
        return n_bytes;
    }
    __atomic_add_fetch(&faults->n_faulty, 1, __ATOMIC_SEQ_CST);
    return (size_t)faults->short_bytes;
}

int open(const char * path, int flags, ...) {
    static int (*real)(const char *, int, ...) = NULL;
    if (real == NULL) {
        real = next("open64");
    }
    if (faults != NULL && faults->refuse_direct && (flags & O_DIRECT) != 0) {
        errno = EINVAL;
        return -1;
    }
    va_list arguments;
    va_start(arguments, flags);
    const unsigned mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, unsigned) : 0;
    va_end(arguments);
    return real(path, flags, mode);
}

int open64(const char * path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const unsigned mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, unsigned) : 0;
    va_end(arguments);
    return open(path, flags, mode);
}

ssize_t pread(int file, void * to, size_t n_bytes, off_t offset) {
    static ssize_t (*real)(int, void *, size_t, off_t) = NULL;
    if (real == NULL) {
        real = next("pread64");
    }
    if (strikes()) {
        errno = faults->read_errno;
        return -1;
    }
    return real(file, to, shortened(n_bytes), offset);
}

ssize_t pread64(int file, void * to, size_t n_bytes, off_t offset) {
    return pread(file, to, n_bytes, offset);
}

ssize_t preadv(int file, const struct iovec * parts, int n_parts, off_t offset) {
    static ssize_t (*real)(int, const struct iovec *, int, off_t) = NULL;
    if (real == NULL) {
        real = next("preadv64");
    }
    if (strikes()) {
        errno = faults->read_errno;
        return -1;
    }
    return real(file, parts, n_parts, offset);
}

ssize_t preadv64(int file, const struct iovec * parts, int n_parts, off_t offset) {
    return preadv(file, parts, n_parts, offset);
}

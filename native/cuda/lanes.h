// Who computes a kernel: one thread of a CPU, or the threads of one block of a GPU. A kernel is written once for any of
// them, so that what a GPU runs is tested on a CPU.
//
// All lanes run the same functions. What they do together goes through:
//
//   each(n, f)     f(i) for i in 0 .. n - 1, in any order, each on the lane that owns i; then all lanes meet
//   at(i, f)       f() on the lane that owns i; the others go on
//   best(n, key)   the index of the greatest key(i), the lower one of equal ones, -1 if all are 0; key(i) is called by
//                  i's owner; all lanes have called theirs when the first one returns
//   add(word, n)   adds to an int32_t that other lanes add to as well; read it after a meeting
//   meet()         no lane goes on before all are here
//
// One lane may also talk with another thread, on the other side of a bus perhaps:
//
//   publish(word, value)   writes it; who reads it there sees all that the lane, and those that it met, wrote before
//   wait(word, value)      until the word has the value; the lane then sees all that was written before it there
//
// So what belongs to an index may be written and read by its owner at any time. The other lanes may read it after a
// meeting, and the owner may write it again after the next one.

#pragma once

#include <cstdint>
#include <cstring>

#if !defined(__CUDACC__)
#include <atomic>
#include <chrono>
#include <thread>
#endif

#if defined(__CUDACC__)
#define S2MOE_ANYWHERE __host__ __device__
#else
#define S2MOE_ANYWHERE
#endif

namespace s2moe {

// Orders as the value does, and is 0 for what may not be chosen: -INFINITY, or no number. An integer, since many GPUs
// compare these 32 times as fast as doubles.
S2MOE_ANYWHERE inline uint64_t order_key(double value) {
    constexpr uint64_t sign = uint64_t{1} << 63;
    constexpr uint64_t infinite = uint64_t{0x7FF} << 52;
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(bits));
    if ((bits & ~sign) > infinite || bits == (sign | infinite)) {
        return 0;
    }
    if (bits == sign) {
        bits = 0; // the two zeros are equal
    }
    return (bits & sign) != 0 ? ~bits : bits | sign;
}

#if !defined(__CUDACC__)
// All lanes in one thread.
struct one_lane {
    template <class function> void each(int n, const function & f) {
        for (int i = 0; i < n; ++i) {
            f(i);
        }
    }
    template <class function> void at(int, const function & f) {
        f();
    }
    template <class function> int best(int n, const function & key) {
        uint64_t top = 0;
        int index = -1;
        for (int i = 0; i < n; ++i) {
            if (const uint64_t value = key(i); value > top) {
                top = value;
                index = i;
            }
        }
        return index;
    }
    void add(int32_t * word, int32_t n) {
        *word += n;
    }
    void meet() {
    }
    void publish(uint32_t * word, uint32_t value) {
        std::atomic_ref<uint32_t>(*word).store(value, std::memory_order_release);
    }
    void wait(uint32_t * word, uint32_t value) {
        while (std::atomic_ref<uint32_t>(*word).load(std::memory_order_acquire) != value) {
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }
};
#endif

} // namespace s2moe

// The lanes of lanes.h on a GPU: the threads of one block. Device code only.

#pragma once

#include <cstdint>

#include "lanes.h"

namespace s2moe {

constexpr int warp_size = 32;
constexpr int max_warps = 4;
constexpr unsigned whole_warp = 0xFFFFFFFF;

// The threads of one block, in whole warps.
class block_lanes {
  public:
    // Two of each, so that a warp may begin the next search while another one still reads the results of the last.
    struct exchange {
        uint64_t keys[2][max_warps];
        int indices[2][max_warps];
    };

    __device__ explicit block_lanes(exchange & shared) : shared(shared) {
    }

    template <class function> __device__ void each(int n, const function & f) {
        for (int i = thread(); i < n; i += n_threads()) {
            f(i);
        }
        __syncthreads();
    }

    template <class function> __device__ void at(int i, const function & f) {
        if (i % n_threads() == thread()) {
            f();
        }
    }

    template <class function> __device__ int best(int n, const function & key) {
        uint64_t top = 0;
        int index = -1;
        for (int i = thread(); i < n; i += n_threads()) {
            const uint64_t value = key(i);
            if (value > top) {
                top = value;
                index = i;
            }
        }
        for (int distance = warp_size / 2; distance > 0; distance /= 2) {
            const uint64_t other_top = __shfl_xor_sync(whole_warp, top, distance);
            const int other_index = __shfl_xor_sync(whole_warp, index, distance);
            keep_better(top, index, other_top, other_index);
        }
        turn ^= 1;
        if (thread() % warp_size == 0) {
            shared.keys[turn][thread() / warp_size] = top;
            shared.indices[turn][thread() / warp_size] = index;
        }
        __syncthreads();
        top = 0;
        index = -1;
        for (int warp = 0; warp < n_threads() / warp_size; ++warp) {
            keep_better(top, index, shared.keys[turn][warp], shared.indices[turn][warp]);
        }
        return index;
    }

    __device__ void meet() {
        __syncthreads();
    }

    __device__ void publish(uint32_t * word, uint32_t value) {
        __threadfence_system(); // for what the others wrote, too
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
    }

    __device__ void wait(uint32_t * word, uint32_t value) {
        uint32_t found = 0;
        while (true) {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(word) : "memory");
            if (found == value) {
                return;
            }
            __nanosleep(500);
        }
    }

  private:
    __device__ static int thread() {
        return static_cast<int>(threadIdx.x);
    }
    __device__ static int n_threads() {
        return static_cast<int>(blockDim.x);
    }

    // without a key there is no index, on either side
    __device__ static void keep_better(uint64_t & top, int & index, uint64_t other_top, int other_index) {
        if (other_top > top || (other_top == top && other_index < index)) {
            top = other_top;
            index = other_index;
        }
    }

    exchange & shared;
    int turn = 0;
};

} // namespace s2moe

// The block_type of block_lanes.h on a GPU. Device code only.

#pragma once

#include <cstdint>

#include "block_lanes.h"

namespace s2moe {

struct cuda_block {
    static constexpr int warp_size = 32;
    static constexpr int max_warps = 4;

    __device__ static int thread() {
        return static_cast<int>(threadIdx.x);
    }
    __device__ static int n_threads() {
        return static_cast<int>(blockDim.x);
    }
    __device__ static void meet() {
        __syncthreads();
    }
    template <class number> __device__ static number from_other(number value, int distance) {
        return __shfl_xor_sync(0xFFFFFFFF, value, distance);
    }
    __device__ static void add(int32_t * word, int32_t n) {
        atomicAdd(word, n);
    }
    __device__ static void store(uint32_t * word, uint32_t value) {
        __threadfence_system(); // for what the others wrote, too
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
    }
    __device__ static uint32_t load(const uint32_t * word) {
        uint32_t value = 0;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
        return value;
    }
    __device__ static void pause() {
        __nanosleep(500);
    }
};

using cuda_lanes = block_lanes<cuda_block>;

} // namespace s2moe

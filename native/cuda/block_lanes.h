// The lanes of lanes.h as threads of one block. What a GPU has of its own comes as a `block_type`, so that the rest is
// tested on a CPU, too (tests/test_lanes.h):
//
//   warp_size, max_warps      constants; blocks have whole warps, at most max_warps
//   thread(), n_threads()     this thread's place in the block, from 0; the block's size
//   meet()                    no thread goes on before all are here; each then sees what the others wrote
//   from_other(v, distance)   the `v` of the thread whose place differs by `distance` (exclusive or) in the same warp,
//                             all of whose threads call it
//   add(word, n)              in one step, to an int32_t that the threads share
//   store(word, value)        for another thread beyond the block: it sees all that this one saw or wrote before
//   load(word), pause()       the other half of it; a while between two looks

#pragma once

#include <cstdint>

#include "lanes.h"

namespace s2moe {

// The size of a block for n things: whole warps.
template <class block_type> constexpr int block_size_for(int n) {
    const int n_warps = (n + block_type::warp_size - 1) / block_type::warp_size;
    const int n_most = n_warps < block_type::max_warps ? n_warps : block_type::max_warps;
    return (n_most > 1 ? n_most : 1) * block_type::warp_size;
}

template <class block_type> class block_lanes {
  public:
    // Shared by the threads. Two of each, so that a warp may begin the next search while another one still reads the
    // results of the last.
    struct exchange {
        uint64_t keys[2][block_type::max_warps];
        int indices[2][block_type::max_warps];
    };

    S2MOE_ANYWHERE block_lanes(block_type block, exchange & shared) : block(block), shared(shared) {
    }

    template <class function> S2MOE_ANYWHERE void each(int n, const function & f) {
        for (int i = block.thread(); i < n; i += block.n_threads()) {
            f(i);
        }
        block.meet();
    }

    template <class function> S2MOE_ANYWHERE void at(int i, const function & f) {
        if (i % block.n_threads() == block.thread()) {
            f();
        }
    }

    template <class function> S2MOE_ANYWHERE int best(int n, const function & key) {
        uint64_t top = 0;
        int index = -1;
        for (int i = block.thread(); i < n; i += block.n_threads()) {
            const uint64_t value = key(i);
            if (value > top) {
                top = value;
                index = i;
            }
        }
        for (int distance = block_type::warp_size / 2; distance > 0; distance /= 2) {
            const uint64_t other_top = block.from_other(top, distance);
            const int other_index = block.from_other(index, distance);
            keep_better(top, index, other_top, other_index);
        }
        turn ^= 1;
        if (block.thread() % block_type::warp_size == 0) {
            shared.keys[turn][block.thread() / block_type::warp_size] = top;
            shared.indices[turn][block.thread() / block_type::warp_size] = index;
        }
        block.meet();
        top = 0;
        index = -1;
        for (int warp = 0; warp < block.n_threads() / block_type::warp_size; ++warp) {
            keep_better(top, index, shared.keys[turn][warp], shared.indices[turn][warp]);
        }
        return index;
    }

    S2MOE_ANYWHERE void add(int32_t * word, int32_t n) {
        block.add(word, n);
    }

    S2MOE_ANYWHERE void meet() {
        block.meet();
    }

    S2MOE_ANYWHERE void publish(uint32_t * word, uint32_t value) {
        block.store(word, value);
    }

    S2MOE_ANYWHERE void wait(uint32_t * word, uint32_t value) {
        while (block.load(word) != value) {
            block.pause();
        }
    }

  private:
    // without a key there is no index, on either side
    S2MOE_ANYWHERE static void keep_better(uint64_t & top, int & index, uint64_t other_top, int other_index) {
        if (other_top > top || (other_top == top && other_index < index)) {
            top = other_top;
            index = other_index;
        }
    }

    block_type block;
    exchange & shared;
    int turn = 0;
};

} // namespace s2moe

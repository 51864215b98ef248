// Lanes that find what a kernel's text takes for granted: an order, or a meeting that it does not ask for.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "block_lanes.h"

// Does what lanes do in any order, in one thread.
class shuffled_lanes {
  public:
    template <class function> void each(int n, const function & f) {
        for (const int i : order(n)) {
            f(i);
        }
    }
    template <class function> void at(int, const function & f) {
        f();
    }
    template <class function> int best(int n, const function & key) {
        uint64_t top = 0;
        int index = -1;
        for (const int i : order(n)) {
            const uint64_t value = key(i);
            if (value > top || (value == top && value != 0 && i < index)) {
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
        s2moe::one_lane().publish(word, value);
    }
    void wait(uint32_t * word, uint32_t value) {
        s2moe::one_lane().wait(word, value);
    }

  private:
    std::vector<int> order(int n) {
        std::vector<int> indices(n);
        std::iota(indices.begin(), indices.end(), 0);
        std::shuffle(indices.begin(), indices.end(), random);
        return indices;
    }

    std::mt19937_64 random{3};
};

// The threads of one block, as those of a GPU but for the size of a warp: they meet where those meet and nowhere else,
// so that the thread sanitizer sees what is missing.
class thread_block {
  public:
    static constexpr int warp_size = 4;
    static constexpr int max_warps = 3;
    static constexpr int most_threads = warp_size * max_warps;

    struct team {
        explicit team(int n_threads) : n_threads(n_threads), all(n_threads) {
        }
        int n_threads;
        std::barrier<> all;
        std::barrier<> warps[max_warps] = {
            std::barrier<>(warp_size), std::barrier<>(warp_size), std::barrier<>(warp_size)};
        std::array<uint64_t, most_threads> passed{};
    };

    thread_block(team & with, int place) : with(&with), place(place) {
    }

    int thread() const {
        return place;
    }
    int n_threads() const {
        return with->n_threads;
    }
    void meet() const {
        with->all.arrive_and_wait();
    }
    template <class number> number from_other(number value, int distance) const {
        std::barrier<> & warp = with->warps[place / warp_size];
        with->passed[place] = static_cast<uint64_t>(value);
        warp.arrive_and_wait();
        const auto other = static_cast<number>(with->passed[place ^ distance]);
        warp.arrive_and_wait();
        return other;
    }
    void add(int32_t * word, int32_t n) const {
        std::atomic_ref<int32_t>(*word).fetch_add(n, std::memory_order_relaxed);
    }
    void store(uint32_t * word, uint32_t value) const {
        s2moe::one_lane().publish(word, value);
    }
    uint32_t load(uint32_t * word) const {
        return std::atomic_ref<uint32_t>(*word).load(std::memory_order_acquire);
    }
    void pause() const {
        std::this_thread::yield();
    }

  private:
    team * with;
    int place;
};

using thread_lanes = s2moe::block_lanes<thread_block>;

// Runs kernel(lanes) on the threads of a block.
template <class function> void run_block(int n_threads, const function & kernel) {
    thread_block::team team(n_threads);
    thread_lanes::exchange exchange;
    std::memset(&exchange, 0x01, sizeof(exchange)); // what shared memory holds before a kernel is anything
    std::vector<std::thread> threads;
    for (int place = 0; place < n_threads; ++place) {
        threads.emplace_back([&, place] {
            thread_lanes lanes(thread_block(team, place), exchange);
            kernel(lanes);
        });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
}

// Lanes that find what a kernel's text takes for granted: an order, or a meeting that it does not ask for.

#pragma once

#include <algorithm>
#include <array>
#include <barrier>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "lanes.h"

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

// Threads that meet where those of a block meet, and nowhere else: the thread sanitizer sees what is missing.
class thread_lanes {
  public:
    static constexpr int n_lanes = 3;

    struct team {
        std::barrier<> barrier{n_lanes};
        std::array<std::array<std::pair<uint64_t, int>, n_lanes>, 2> found;
    };

    thread_lanes(team & with, int lane) : with(with), lane(lane) {
    }

    template <class function> void each(int n, const function & f) {
        for (int i = lane; i < n; i += n_lanes) {
            f(i);
        }
        meet();
    }
    template <class function> void at(int i, const function & f) {
        if (i % n_lanes == lane) {
            f();
        }
    }
    template <class function> int best(int n, const function & key) {
        std::pair<uint64_t, int> top{0, -1};
        const auto keep_better = [&](const std::pair<uint64_t, int> & other) {
            if (other.first > top.first || (other.first == top.first && other.second < top.second)) {
                top = other;
            }
        };
        for (int i = lane; i < n; i += n_lanes) {
            if (const uint64_t value = key(i); value != 0) {
                keep_better({value, i});
            }
        }
        turn ^= 1;
        with.found[turn][lane] = top;
        meet();
        for (const auto & each : with.found[turn]) {
            keep_better(each);
        }
        return top.second;
    }
    void meet() {
        with.barrier.arrive_and_wait();
    }
    void publish(uint32_t * word, uint32_t value) {
        s2moe::one_lane().publish(word, value);
    }
    void wait(uint32_t * word, uint32_t value) {
        s2moe::one_lane().wait(word, value);
    }

  private:
    team & with;
    int lane;
    int turn = 0;
};

// The gate's rule as it is written for GPUs chooses exactly what the CPU's own code chooses, whatever computes it.

#include <random>

#include "gate_cases.h"
#include "test_lanes.h"

using namespace s2moe;

namespace {

gate_layer layer_of(const gate_case & of, gate_case_result & result, size_t i) {
    gate_layer layer;
    layer.n_rows = of.n_rows;
    layer.n_expert = of.n_expert;
    layer.k = of.k;
    layer.kind = of.layers[i].kind;
    layer.n_ids = of.n_ids;
    layer.scores = {of.layers[i].scores.data(), of.n_stride * sizeof(float)};
    layer.weights = {of.layers[i].weights.data(), of.n_stride * sizeof(float)};
    layer.gated = {result.layers[i].gated.data(), of.n_expert * sizeof(float)};
    layer.residency = of.layers[i].residency.data();
    layer.exact = result.layers[i].exact.data();
    layer.chosen = result.layers[i].chosen.data();
    return layer;
}

// What shared memory holds before a kernel is anything.
struct dirty_memory {
    gate_memory memory;

    dirty_memory() {
        std::memset(static_cast<void *>(&memory), 0x01, sizeof(memory));
    }
};

template <class lanes_type> gate_case_result computed_by(lanes_type & lanes, const gate_case & of) {
    gate_case_result result(of);
    dirty_memory memory;
    for (size_t i = 0; i < of.layers.size(); ++i) {
        const gate_layer layer = layer_of(of, result, i);
        gate_layer_rows(lanes, of.control, layer, result.accounts.data(), memory.memory);
    }
    return result;
}

gate_case_result computed_by_threads(const gate_case & of, int n_threads) {
    gate_case_result result(of);
    dirty_memory memory;
    run_block(n_threads, [&](thread_lanes & lanes) {
        for (size_t i = 0; i < of.layers.size(); ++i) {
            const gate_layer layer = layer_of(of, result, i);
            gate_layer_rows(lanes, of.control, layer, result.accounts.data(), memory.memory);
            lanes.meet(); // kernels on a stream run one after the other
        }
    });
    return result;
}

void test_keys_order_as_numbers_do() {
    const double infinity = std::numeric_limits<double>::infinity();
    const double least = std::numeric_limits<double>::denorm_min();
    const double greatest = std::numeric_limits<double>::max();
    const double rising[] = {-greatest, -1.5, -1, -least, 0, least, 1, 1.5, greatest, infinity};
    for (size_t i = 0; i + 1 < std::size(rising); ++i) {
        CHECK(order_key(rising[i]) < order_key(rising[i + 1]));
    }
    CHECK(order_key(-0.0) == order_key(0.0));
    CHECK(order_key(-greatest) > 0);
    for (const double none : {-infinity, std::nan(""), -std::nan("")}) {
        CHECK(order_key(none) == 0);
    }
}

// The search of a block: over its threads, then over the lanes of a warp, then over the warps.
void test_best_of_a_block() {
    std::mt19937 random(5);
    for (int n_warps = 1; n_warps <= thread_block::max_warps; ++n_warps) {
        std::vector<std::vector<uint64_t>> searches;
        for (int i = 0; i < 200; ++i) {
            searches.emplace_back(random() % 40);
            const uint64_t most = i % 3 == 0 ? 1 : i % 3 == 1 ? 4 : UINT64_MAX; // ties, and keys of more than 32 bits
            for (uint64_t & key : searches.back()) {
                key = ((uint64_t{random()} << 32) | random()) % (most == UINT64_MAX ? most : most + 1);
            }
        }
        run_block(n_warps * thread_block::warp_size, [&](thread_lanes & lanes) {
            for (const std::vector<uint64_t> & keys : searches) {
                const auto key = [&](int i) { return keys[i]; };
                const int n = static_cast<int>(keys.size());
                CHECK(lanes.best(n, key) == one_lane().best(n, key));
            }
        });
    }
}

void test_sizes_of_blocks() {
    constexpr int warp = thread_block::warp_size;
    CHECK(block_size_for<thread_block>(0) == warp && block_size_for<thread_block>(1) == warp);
    CHECK(block_size_for<thread_block>(warp) == warp && block_size_for<thread_block>(warp + 1) == 2 * warp);
    CHECK(block_size_for<thread_block>(1000) == thread_block::most_threads);
}

void test_one_lane() {
    gate_case_maker maker(1);
    gate_case_counts counts;
    one_lane lanes;
    for (int i = 0; i < 2000; ++i) {
        const gate_case of = maker.next(max_gate_rows, max_gate_experts, max_gate_experts);
        const gate_case_result expected = expected_of(of);
        check_equal(computed_by(lanes, of), expected, 0);
        counts.add(of, expected);
    }
    counts.check(50);
}

void test_order_of_lanes_does_not_matter() {
    gate_case_maker maker(2);
    gate_case_counts counts;
    shuffled_lanes lanes;
    for (int i = 0; i < 500; ++i) {
        const gate_case of = maker.next(8, 128, 10);
        const gate_case_result expected = expected_of(of);
        check_equal(computed_by(lanes, of), expected, 0);
        counts.add(of, expected);
    }
    counts.check(10);
}

void test_lanes_meet_where_they_must() {
    gate_case_maker maker(3);
    gate_case_counts counts;
    for (int i = 0; i < 60; ++i) {
        const gate_case of = maker.next(8, 60, 4);
        const gate_case_result expected = expected_of(of);
        check_equal(computed_by_threads(of, thread_block::warp_size * (1 + i % thread_block::max_warps)), expected, 0);
        counts.add(of, expected);
    }
    counts.check(2);
}

} // namespace

int main() {
    test_keys_order_as_numbers_do();
    test_best_of_a_block();
    test_sizes_of_blocks();
    test_one_lane();
    test_order_of_lanes_does_not_matter();
    test_lanes_meet_where_they_must();
    return 0;
}

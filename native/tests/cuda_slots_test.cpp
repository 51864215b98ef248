// Experts in a GPU's slots: what is computed does not depend on which of them have one. Exits with 77 where there is no
// GPU.
//
// Prompts go through kernels that divide their sums by the number of matrices in a stack, so logits may differ in their
// last bits; of the CPU, which rounds activations in another way, they may differ more.

#include <algorithm>
#include <cmath>

#include <cuda_runtime.h>

#include "stored_model.h"

namespace {

constexpr int skipped = 77;
constexpr int32_t all_layers = 999;
constexpr int32_t n_tokens = 100;
constexpr float same_kernels = 0.02F; // of the range of logits
constexpr float other_device = 0.1F;

struct row {
    std::vector<float> logits;
    int best = 0;
    float range = 0;
};

std::vector<row> transcript(const test_model & m) {
    const auto tokens = m.tokens(n_tokens);
    std::vector<row> rows;
    const auto decode = [&](int32_t from, int32_t n) {
        CHECK(s2moe_decode(m.ctx.get(), &tokens[from], n, from, true) == S2MOE_OK);
        for (int32_t i = 0; i < n; ++i) {
            row each{.logits = m.logits(i)};
            const auto [least, most] = std::minmax_element(each.logits.begin(), each.logits.end());
            each.best = static_cast<int>(most - each.logits.begin());
            each.range = *most - *least;
            rows.push_back(each);
        }
    };
    m.clear();
    decode(0, 8);
    decode(8, 40);
    for (int32_t i = 48; i < n_tokens; ++i) {
        decode(i, 1);
    }
    return rows;
}

// The best token may only be another one where the two are equal within the tolerance.
void check_alike(const std::vector<row> & a, const std::vector<row> & b, float tolerance, const char * what) {
    int n_other = 0;
    float largest = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        for (size_t j = 0; j < a[i].logits.size(); ++j) {
            largest = std::max(largest, std::abs(a[i].logits[j] - b[i].logits[j]) / a[i].range);
        }
        if (a[i].best != b[i].best) {
            ++n_other;
            CHECK(a[i].logits[a[i].best] - a[i].logits[b[i].best] < tolerance * a[i].range);
        }
    }
    std::printf(
        "%s: largest difference %.4f of the range, %d of %zu best tokens differ\n", what, largest, n_other, a.size());
    CHECK(largest < tolerance);
}

s2moe_device_stats stats_of(const stored_model & m) {
    s2moe_device_stats stats = {};
    s2moe_experts_device_stats(m.experts, &stats);
    return stats;
}

void test_slots(double device_share, const std::vector<row> & whole, const std::vector<row> & on_cpu) {
    stored_model m("", 0.5, 128, 1, true, all_layers);
    const uint64_t floor = s2moe_experts_device_floor_bytes(m.experts);
    const auto capacity = floor + static_cast<uint64_t>(device_share * static_cast<double>(floor) * m.n_moe_layer());
    CHECK(s2moe_experts_use_device(m.experts, m.ctx.get(), "cuda:0", capacity) == S2MOE_OK);
    check_alike(transcript(m), whole, same_kernels, "slots against the whole model on the GPU");
    check_alike(transcript(m), on_cpu, other_device, "slots against the CPU");
    const auto before = stats_of(m);
    CHECK(before.requests > 0 && before.demand_bytes > 0);
    CHECK((before.evictions > 0) == (device_share < 1));
    const auto again = transcript(m);
    check_alike(again, whole, same_kernels, "once more");
    CHECK((stats_of(m).requests == before.requests) == (device_share >= 1)); // nothing is asked where all have a slot
    // predictions are copied beside the computation
    const auto ids = m.everything();
    CHECK(s2moe_experts_prefetch(
              m.experts, ids.data(), static_cast<int32_t>(ids.size()), S2MOE_PRIORITY_PREFETCH, nullptr) == S2MOE_OK);
    check_alike(transcript(m), whole, same_kernels, "with prefetches");
}

} // namespace

int main() {
    int n_devices = 0;
    if (const cudaError_t status = cudaGetDeviceCount(&n_devices); status != cudaSuccess || n_devices == 0) {
        std::fprintf(stderr, "skipped: no GPU answers: %s\n", cudaGetErrorString(status));
        return skipped;
    }
    const auto on_cpu = transcript(test_model(128, 64));
    const auto whole = transcript(test_model(128, 64, true, all_layers));
    for (const double share : {0.0, 0.4, 1.0}) {
        test_slots(share, whole, on_cpu);
    }
    return 0;
}

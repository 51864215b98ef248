// Experts in a GPU's slots: what is computed does not depend on which of them have one, drafts work there, and what
// cannot be read ends a decode and nothing else. Exits with 77 where there is no GPU.
//
// Prompts go through kernels that divide their sums by the number of matrices in a stack, so logits may differ in their
// last bits; those of the CPU differ more, and with them, at times, the experts that a router chooses. By how much is
// measured with the whole model on the GPU, where there are no slots, and bounded; slots may then differ from either
// by twice as much.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include <cuda_runtime.h>

#include "stored_model.h"

namespace {

constexpr int skipped = 77;
constexpr int32_t all_layers = 999;
constexpr int32_t n_tokens = 100;
constexpr int32_t n_answer = 60;

// Parts of the range of logits. Two kinds of a CPU's kernels for Q4_0 differ by up to 0.028, in half of the rows by
// less than 0.005.
constexpr float largest_of_devices = 0.08F;
constexpr float typical_of_devices = 0.015F;
constexpr float least_tolerance = 0.02F;

struct row {
    std::vector<float> logits;
    int best = 0;
    float range = 0;

    explicit row(std::vector<float> from) : logits(std::move(from)) {
        const auto [least, most] = std::minmax_element(logits.begin(), logits.end());
        best = static_cast<int>(most - logits.begin());
        range = *most - *least;
    }
    // By how much a token is not the best one.
    float gap(int token) const {
        return logits[best] - logits[token];
    }
};

struct gpu_model : stored_model {
    // device_share: of the GPU's slots; 0 = the floor, 1 = slots for every expert
    explicit gpu_model(double device_share, uint32_t n_sequences = 1, const char * path = test_model_path())
        : stored_model("", 0.5, 128, n_sequences, true, all_layers, path) {
        const uint64_t floor = s2moe_experts_device_floor_bytes(experts);
        const auto more = static_cast<uint64_t>(device_share * static_cast<double>(floor) * n_moe_layer());
        CHECK(s2moe_experts_use_device(experts, ctx.get(), "cuda:0", floor + more) == S2MOE_OK);
    }

    s2moe_device_stats device_stats() const {
        s2moe_device_stats result = {};
        s2moe_experts_device_stats(experts, &result);
        return result;
    }

    uint64_t n_requests() const {
        const auto stats = device_stats();
        return stats.requests[S2MOE_PHASE_PREFILL] + stats.requests[S2MOE_PHASE_DECODE];
    }
};

std::vector<row> transcript(const test_model & m) {
    const auto tokens = m.tokens(n_tokens);
    std::vector<row> rows;
    const auto decode = [&](int32_t from, int32_t n) {
        CHECK(s2moe_decode(m.ctx.get(), &tokens[from], n, from, true) == S2MOE_OK);
        for (int32_t i = 0; i < n; ++i) {
            rows.emplace_back(m.logits(i));
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

// Of logits.
struct difference {
    float largest = 0;
    float typical = 0; // the median of the rows' largest
    float range = 0;   // the smallest of the rows'
    int n_other = 0;   // rows whose best token is another
    float gap = 0;     // the largest between such two
};

difference compare(const std::vector<row> & a, const std::vector<row> & b, const char * what) {
    difference result;
    std::vector<float> of_rows;
    result.range = a[0].range;
    for (size_t i = 0; i < a.size(); ++i) {
        float largest = 0;
        for (size_t j = 0; j < a[i].logits.size(); ++j) {
            CHECK(std::isfinite(a[i].logits[j]) && std::isfinite(b[i].logits[j]));
            largest = std::max(largest, std::abs(a[i].logits[j] - b[i].logits[j]));
        }
        of_rows.push_back(largest);
        result.range = std::min(result.range, a[i].range);
        if (a[i].best != b[i].best) {
            ++result.n_other;
            result.gap = std::max(result.gap, a[i].gap(b[i].best));
        }
    }
    std::sort(of_rows.begin(), of_rows.end());
    result.largest = of_rows.back();
    result.typical = of_rows[of_rows.size() / 2];
    std::printf(
        "%s: logits differ by up to %.4f of %.2f, half of the rows by less than %.4f; %d of %zu best tokens differ, by "
        "up to %.4f\n",
        what,
        result.largest,
        result.range,
        result.typical,
        result.n_other,
        a.size(),
        result.gap);
    return result;
}

// What the slots' logits may differ by.
float tolerance_of(const std::vector<row> & whole, const std::vector<row> & on_cpu) {
    const difference found = compare(whole, on_cpu, "whole model on the GPU against the CPU");
    CHECK(found.largest < largest_of_devices * found.range);
    CHECK(found.typical < typical_of_devices * found.range);
    return std::max(2 * found.largest, least_tolerance * found.range);
}

void check_alike(const std::vector<row> & a, const std::vector<row> & b, float tolerance, const char * what) {
    const difference found = compare(a, b, what);
    CHECK(found.largest <= tolerance);
    CHECK(found.typical < typical_of_devices * found.range);
    CHECK(found.gap <= tolerance);
}

void test_slots(double device_share, const std::vector<row> & whole, const std::vector<row> & on_cpu, float tolerance) {
    const gpu_model m(device_share);
    check_alike(transcript(m), whole, tolerance, "slots against the whole model on the GPU");
    const auto before = m.device_stats();
    for (const int phase : {S2MOE_PHASE_PREFILL, S2MOE_PHASE_DECODE}) {
        CHECK(before.requests[phase] > 0 && before.demand_bytes[phase] > 0);
    }
    CHECK((before.evictions > 0) == (device_share < 1));
    check_alike(transcript(m), on_cpu, tolerance, "slots against the CPU");
    const uint64_t n_before = before.requests[S2MOE_PHASE_PREFILL] + before.requests[S2MOE_PHASE_DECODE];
    CHECK((m.n_requests() == n_before) == (device_share >= 1)); // nothing is asked where all have a slot
    // predictions are copied beside the computation
    const auto ids = m.everything();
    CHECK(s2moe_experts_prefetch(
              m.experts, ids.data(), static_cast<int32_t>(ids.size()), S2MOE_PRIORITY_PREFETCH, nullptr) == S2MOE_OK);
    check_alike(transcript(m), whole, tolerance, "with prefetches");
}

// Greedy tokens behind a prompt, and what each was chosen from.
struct plain_text {
    std::vector<int32_t> tokens;
    std::vector<row> rows;
};

plain_text plainly(const gpu_model & m) {
    const auto prompt = m.tokens(9);
    m.clear();
    CHECK(s2moe_decode(m.ctx.get(), prompt.data(), 8, 0, false) == S2MOE_OK);
    plain_text result;
    int32_t token = prompt.back();
    for (int32_t i = 0; i < n_answer; ++i) {
        CHECK(s2moe_decode(m.ctx.get(), &token, 1, 8 + i, false) == S2MOE_OK);
        token = result.rows.emplace_back(m.logits()).best;
        result.tokens.push_back(token);
    }
    return result;
}

std::vector<int32_t> speculatively(const gpu_model & m, s2moe_speculator * speculator, const char * options) {
    const auto prompt = m.tokens(9);
    m.clear();
    CHECK(s2moe_decode(m.ctx.get(), prompt.data(), 8, 0, false) == S2MOE_OK);
    s2moe_sampler * sampler = s2moe_sampler_create(m.model.get(), R"({"temperature": 0})", nullptr, nullptr);
    CHECK(s2moe_speculator_begin(speculator, options) == S2MOE_OK);
    std::vector<int32_t> text;
    int32_t token = prompt.back();
    while (text.size() < n_answer) {
        const auto n_text = static_cast<int32_t>(text.size());
        int32_t chosen[S2MOE_N_VERIFY_ROWS] = {};
        int32_t n = 0;
        CHECK(s2moe_speculator_step(speculator, sampler, token, 8 + n_text, n_answer - n_text, chosen, &n) == S2MOE_OK);
        CHECK(n > 0);
        text.insert(text.end(), chosen, chosen + n);
        token = text.back();
    }
    s2moe_sampler_free(sampler);
    return text;
}

// Several rows go through other kernels than one, so a text may depart from the plain one where two tokens are near.
void check_text(const plain_text & plain, const std::vector<int32_t> & text, float tolerance) {
    const auto [at, other] = std::mismatch(plain.tokens.begin(), plain.tokens.end(), text.begin(), text.end());
    const auto n_same = static_cast<size_t>(at - plain.tokens.begin());
    std::printf("exact drafts: %zu of %zu tokens are those of plain decoding\n", n_same, plain.tokens.size());
    CHECK(text.size() == plain.tokens.size());
    CHECK(n_same == text.size() || plain.rows[n_same].gap(*other) <= tolerance);
}

std::string report_of(const s2moe_speculator * speculator) {
    char * text = nullptr;
    CHECK(s2moe_speculator_report(speculator, &text) == S2MOE_OK);
    std::string result = text;
    s2moe_string_free(text);
    return result;
}

void test_speculates(float tolerance) {
    const gpu_model m(0.3, S2MOE_N_DRAFT_SEQUENCES);
    int32_t status = 1;
    s2moe_speculator * speculator = s2moe_speculator_create(m.ctx.get(), nullptr, nullptr, &status);
    CHECK(speculator != nullptr && status == S2MOE_OK);
    const plain_text plain = plainly(m);
    check_text(plain, speculatively(m, speculator, R"({"preset": "exact", "adaptive": false})"), tolerance);
    CHECK(number_in(report_of(speculator), "n_drafted") > 0);
    constexpr const char * balanced = R"({"preset": "balanced", "adaptive": false})";
    constexpr const char * fast = R"({"preset": "fast", "adaptive": false})";
    for (const char * options : {balanced, fast}) {
        speculatively(m, speculator, options);
        const std::string report = report_of(speculator); // what the gate on the GPU chose and spent is in it
        CHECK(number_in(report, "n_drafted") > 0);
        CHECK(number_in(report, "n_committed_rows") == n_answer);
        CHECK(number_in(report, "n_biased_rows") > 0);
        const double budget = number_in(report, "error_budget") * number_in(report, "n_token_layers");
        CHECK(number_in(report, "displaced_weight") > 0 && number_in(report, "displaced_weight") <= budget * 1.00001);
    }
    check_text(plain, plainly(m).tokens, tolerance); // nothing of the gate is left
    s2moe_speculator_free(speculator);
}

// Experts that cannot be read: the GPU waits for them in vain, and goes on.
void test_fails_and_goes_on() {
    const std::string path = std::string(test_model_path()) + ".cut";
    std::filesystem::copy_file(test_model_path(), path, std::filesystem::copy_options::overwrite_existing);
    {
        const gpu_model m(1, 1, path.c_str());
        const auto tokens = m.tokens(40);
        const auto one_token = [&] {
            m.clear();
            CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 1, 0, false) == S2MOE_OK);
            return m.logits();
        };
        const auto before = one_token(); // its experts have slots now
        std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
        for (int i = 0; i < 2; ++i) {
            m.clear();
            CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 30, 0, false) == S2MOE_ERROR_IO);
            CHECK(llama_memory_seq_pos_max(llama_get_memory(m.ctx.get()), 0) == -1);
            CHECK(one_token() == before);
        }
    }
    std::filesystem::remove(path);
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
    const float tolerance = tolerance_of(whole, on_cpu);
    for (const double share : {0.0, 0.4, 1.0}) {
        test_slots(share, whole, on_cpu, tolerance);
    }
    test_speculates(tolerance);
    test_fails_and_goes_on();
    return 0;
}

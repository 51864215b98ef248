// The expert store: models whose experts come from the drive, also while other threads ask and abort.

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "stored_model.h"

namespace {

// Logits of a prompt of 20 tokens and of 12 more, one by one.
std::vector<float> transcript(const test_model & m) {
    const auto tokens = m.tokens(32);
    m.clear();
    std::vector<float> result;
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 8, 0, false) == S2MOE_OK);
    for (int32_t i = 8; i < 32; ++i) {
        CHECK(s2moe_decode(m.ctx.get(), &tokens[i], 1, i, false) == S2MOE_OK);
        const auto row = m.logits();
        result.insert(result.end(), row.begin(), row.end());
    }
    return result;
}

void expect_refusal(const char * path, const char * options, int32_t expected) {
    int32_t status = 1;
    CHECK(s2moe_experts_open(path, options, &status) == nullptr);
    CHECK(status == expected);
    CHECK(s2moe_last_error()[0] != '\0');
    CHECK(s2moe_experts_open(path, options, nullptr) == nullptr);
}

void test_options() {
    const char * path = test_model_path();
    expect_refusal("/none/model.gguf", "", S2MOE_ERROR_IO);
    for (const char * options : {"{",
                                 "[]",
                                 "7",
                                 R"({"io": "tape"})",
                                 R"({"io": 1})",
                                 R"({"reader": ""})",
                                 R"({"queue_depth": 0})",
                                 R"({"queue_depth": 257})",
                                 R"({"queue_depth": "8"})"}) {
        expect_refusal(path, options, S2MOE_ERROR_INVALID);
    }
    s2moe_experts_free(nullptr);
    for (const char * options : {"", "{}", R"({"io": "buffered", "reader": "threads", "queue_depth": 1})"}) {
        s2moe_experts * experts = s2moe_experts_open(path, options, nullptr);
        CHECK(experts != nullptr);
        char * json = nullptr;
        CHECK(s2moe_experts_reader(experts, &json) == S2MOE_OK && json != nullptr);
        s2moe_string_free(json);
        s2moe_experts_free(experts);
    }
}

void test_layout() {
    char * json = nullptr;
    CHECK(s2moe_model_layout("/none/model.gguf", &json) == S2MOE_ERROR_IO);
    CHECK(json == nullptr);
    CHECK(s2moe_model_layout(test_model_path(), &json) == S2MOE_OK);
    CHECK(std::string(json).find("\"blk.0.ffn_up_exps.weight\"") != std::string::npos);
    s2moe_string_free(json);
}

void test_equals_a_plain_load() {
    const auto expected = transcript(test_model(128));
    for (const char * reader : {R"({"reader": "threads", "io": "buffered"})", ""}) {
        const stored_model m(reader);
        CHECK(transcript(m) == expected);
        CHECK(m.stats().evictions > 0);
        m.allocate(0.5);
        CHECK(transcript(m) == expected);
        m.allocate(1);
        CHECK(transcript(m) == expected);
        const auto before = m.stats();
        CHECK(transcript(m) == expected);
        CHECK(m.stats().misses[S2MOE_PHASE_DECODE] == before.misses[S2MOE_PHASE_DECODE]);
        CHECK(m.stats().evictions == before.evictions);
    }
}

void test_capacity() {
    const stored_model m;
    const uint64_t floor = s2moe_experts_floor_bytes(m.experts);
    CHECK(floor > 0);
    const auto before = m.stats();
    CHECK(before.capacity_bytes == floor);
    CHECK(s2moe_experts_allocate(m.experts, floor - 1) == S2MOE_ERROR_INVALID);
    CHECK(s2moe_experts_allocate(m.experts, 0) == S2MOE_ERROR_INVALID);
    CHECK(m.stats().capacity_bytes == before.capacity_bytes);
    CHECK(s2moe_experts_allocate(m.experts, UINT64_MAX) == S2MOE_OK); // no more than there is to hold
    CHECK(m.stats().capacity_experts == m.everything().size());
    const auto expected = transcript(m);
    CHECK(s2moe_experts_shrink(m.experts, 2 * floor) <= 2 * floor);
    CHECK(m.stats().resident_bytes <= m.stats().capacity_bytes);
    CHECK(transcript(m) == expected);
    CHECK(s2moe_experts_shrink(m.experts, 0) == floor);
    CHECK(transcript(m) == expected);
    CHECK(s2moe_experts_grow(m.experts, 0) == floor);
    CHECK(s2moe_experts_grow(m.experts, 2 * floor) <= 2 * floor);
    CHECK(m.stats().capacity_bytes > floor);
    CHECK(transcript(m) == expected);
    CHECK(s2moe_experts_grow(m.experts, UINT64_MAX) == m.stats().capacity_bytes);
    CHECK(m.stats().capacity_experts == m.everything().size());
    CHECK(transcript(m) == expected);
    CHECK(m.stats().resident_experts > 0);
}

void test_refuses_bad_ids() {
    const stored_model m("", 1);
    const auto info = m.info();
    std::vector<uint8_t> mask(info.n_expert + 1, 7);
    for (const int32_t layer : {-1, info.n_layer, INT32_MAX, INT32_MIN}) {
        CHECK(s2moe_experts_residency(m.experts, layer, mask.data(), info.n_expert) == S2MOE_ERROR_INVALID);
    }
    for (const int32_t n : {-1, 0, info.n_expert - 1, info.n_expert + 1}) {
        CHECK(s2moe_experts_residency(m.experts, 0, mask.data(), n) == S2MOE_ERROR_INVALID);
    }
    CHECK(mask == std::vector<uint8_t>(mask.size(), 7));
    for (const s2moe_expert_id bad : {s2moe_expert_id{0, -1}, {0, info.n_expert}, {-1, 0}, {info.n_layer, 0}}) {
        const s2moe_expert_id ids[] = {{0, 0}, bad};
        int32_t n_queued = 7;
        CHECK(s2moe_experts_prefetch(m.experts, ids, 2, S2MOE_PRIORITY_PREFETCH, &n_queued) == S2MOE_ERROR_INVALID);
        CHECK(n_queued == 7);
        CHECK(s2moe_experts_pin(m.experts, ids, 2) == S2MOE_ERROR_INVALID);
    }
    CHECK(s2moe_experts_prefetch(m.experts, nullptr, 0, S2MOE_PRIORITY_PREFETCH, nullptr) == S2MOE_OK);
    CHECK(s2moe_experts_pin(m.experts, nullptr, 0) == S2MOE_OK);
    std::vector<uint64_t> counts(m.everything().size() + 1);
    const auto n = static_cast<int64_t>(counts.size());
    for (const int64_t wrong : {n, n - 2, int64_t{0}, int64_t{-1}}) {
        CHECK(s2moe_experts_counts(m.experts, counts.data(), wrong) == S2MOE_ERROR_INVALID);
        CHECK(s2moe_experts_warm(m.experts, counts.data(), wrong) == S2MOE_ERROR_INVALID);
    }
    CHECK(m.stats().resident_experts == 0);
}

// Whatever is on its way when the memory it goes to is given back must have landed.
void test_memory_is_kept_until_reads_have_landed() {
    for (int i = 0; i < 20; ++i) {
        const stored_model m(i % 2 == 0 ? "" : R"({"reader": "threads", "queue_depth": 3})", 1);
        const auto ids = m.everything();
        int32_t n_queued = 0;
        CHECK(s2moe_experts_prefetch(
                  m.experts, ids.data(), static_cast<int32_t>(ids.size()), S2MOE_PRIORITY_PREFETCH, &n_queued) ==
              S2MOE_OK);
        CHECK(n_queued == static_cast<int32_t>(ids.size()));
        if (i % 4 < 2) {
            m.allocate(0);
            transcript(m);
        } else if (i % 4 == 2) {
            s2moe_experts_shrink(m.experts, 0);
            s2moe_experts_grow(m.experts, UINT64_MAX);
        }
    }
}

void test_any_thread() {
    const stored_model m("", 0.4);
    const auto expected = transcript(m);
    const auto ids = m.everything();
    const auto n_expert = m.info().n_expert;
    const auto n_layer = m.n_moe_layer();
    std::atomic<bool> done = false;
    const std::function<void(uint32_t)> ask = [&](uint32_t at) {
        std::vector<uint8_t> mask(n_expert);
        while (!done) {
            at = at * 1664525 + 1013904223;
            const auto * some = &ids[at % (ids.size() - 4)];
            const auto priority = at % 3 == 0 ? S2MOE_PRIORITY_WARMUP : S2MOE_PRIORITY_PREFETCH;
            CHECK(s2moe_experts_prefetch(m.experts, some, 4, priority, nullptr) == S2MOE_OK);
            CHECK(s2moe_experts_pin(m.experts, some, 2) == S2MOE_OK);
            CHECK(s2moe_experts_residency(m.experts, static_cast<int32_t>(at % n_layer), mask.data(), n_expert) ==
                  S2MOE_OK);
            s2moe_expert_stats stats = {};
            s2moe_experts_stats(m.experts, &stats);
            CHECK(stats.resident_bytes <= stats.capacity_bytes);
            s2moe_expert_costs costs = {};
            s2moe_experts_costs(m.experts, &costs);
            s2moe_experts_cancel_prefetches(m.experts);
            std::this_thread::yield();
        }
    };
    std::thread first(ask, 1);
    std::thread second(ask, 2);
    for (int i = 0; i < 5; ++i) {
        CHECK(transcript(m) == expected);
    }
    done = true;
    first.join();
    second.join();
}

// An abort may fall between the operations of a layer, while its experts are being read.
void test_abort() {
    const stored_model m;
    const auto expected = transcript(m);
    const auto tokens = m.tokens(32);
    s2moe_abort * abort = s2moe_abort_create(m.ctx.get());
    abort_storm storm(abort);
    int n_aborted = 0;
    for (int i = 0; i < 100; ++i) {
        m.clear();
        const int32_t status = s2moe_decode(m.ctx.get(), tokens.data(), 32, 0, false);
        CHECK(status == S2MOE_OK || status == S2MOE_ERROR_ABORTED);
        n_aborted += status == S2MOE_ERROR_ABORTED;
    }
    storm.end();
    CHECK(n_aborted > 0);
    s2moe_abort_clear(abort);
    CHECK(transcript(m) == expected);
    llama_set_abort_callback(m.ctx.get(), nullptr, nullptr);
    s2moe_abort_free(abort);
}

void test_trace() {
    const stored_model m;
    const auto tokens = m.tokens(4);
    std::vector<s2moe_expert_trace> records(100);
    CHECK(s2moe_experts_set_trace(m.experts, -1) == S2MOE_ERROR_INVALID);
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 1, 0, false) == S2MOE_OK);
    CHECK(s2moe_experts_take_trace(m.experts, records.data(), 100) == 0);
    CHECK(s2moe_experts_set_trace(m.experts, 100) == S2MOE_OK);
    CHECK(s2moe_decode(m.ctx.get(), &tokens[1], 1, 1, false) == S2MOE_OK);
    CHECK(s2moe_experts_take_trace(m.experts, records.data(), 0) == 0);
    CHECK(s2moe_experts_take_trace(m.experts, records.data(), 100) == m.n_moe_layer());
    for (int32_t i = 0; i < m.n_moe_layer(); ++i) {
        CHECK(records[i].layer == i && records[i].n_tokens == 1);
        CHECK(records[i].n_hits + records[i].n_misses == m.info().n_expert_used);
    }
}

} // namespace

int main() {
    llama_backend_init();
    test_options();
    test_layout();
    test_equals_a_plain_load();
    test_capacity();
    test_refuses_bad_ids();
    test_memory_is_kept_until_reads_have_landed();
    test_any_thread();
    test_abort();
    test_trace();
    return 0;
}

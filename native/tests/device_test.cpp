// Experts in a GPU's slots, with the CPU in the GPU's place: the same bits as a plain load, whatever has a slot.

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>

#include "stored_model.h"

namespace {

// On plain kernels, as the slots' own.
struct device_model : stored_model {
    // share: of the host's slots; device_share: of the device's; 0 = the floor, 1 = slots for every expert
    explicit device_model(double device_share, double share = 0.3, const char * device = "host")
        : stored_model("", share, 128, S2MOE_N_DRAFT_SEQUENCES, false) {
        const uint64_t floor = s2moe_experts_device_floor_bytes(experts);
        CHECK(s2moe_experts_use_device(
                  experts, ctx.get(), device, floor + static_cast<uint64_t>(device_share * floor * n_moe_layer())) ==
              S2MOE_OK);
    }

    s2moe_device_stats device_stats() const {
        s2moe_device_stats result = {};
        s2moe_experts_device_stats(experts, &result);
        return result;
    }

    // With what is on its way.
    int n_at_hand() const {
        int n = 0;
        std::vector<uint8_t> mask(info().n_expert);
        for (int32_t layer = 0; layer < n_moe_layer(); ++layer) {
            CHECK(s2moe_experts_residency(experts, layer, mask.data(), info().n_expert) == S2MOE_OK);
            n += static_cast<int>(std::count_if(mask.begin(), mask.end(), [](uint8_t m) { return m != S2MOE_ABSENT; }));
        }
        return n;
    }
};

uint64_t sum(const uint64_t (&values)[S2MOE_N_PHASES]) {
    return values[S2MOE_PHASE_DECODE] + values[S2MOE_PHASE_PREFILL];
}

// Logits of prompts of 8 and 30 tokens, and of single tokens.
std::vector<float> transcript(const test_model & m) {
    const auto tokens = m.tokens(60);
    std::vector<float> result;
    const auto decode = [&](int32_t from, int32_t n) {
        CHECK(s2moe_decode(m.ctx.get(), &tokens[from], n, from, true) == S2MOE_OK);
        for (int32_t i = 0; i < n; ++i) {
            const auto row = m.logits(i);
            result.insert(result.end(), row.begin(), row.end());
        }
    };
    m.clear();
    decode(0, 8);
    decode(8, 30);
    for (int32_t i = 38; i < 60; ++i) {
        decode(i, 1);
    }
    return result;
}

std::vector<float> expected_transcript() {
    return transcript(test_model(128, 64, false));
}

void test_equals_a_plain_load() {
    const auto expected = expected_transcript();
    for (const std::string device : {"host", "host-part-pinned", "host-unpinned"}) {
        for (const double device_share : {0.0, 0.4, 1.0}) {
            for (const double share : {0.0, 1.0}) {
                const device_model m(device_share, share, device.c_str());
                CHECK(transcript(m) == expected);
                CHECK(transcript(m) == expected);
                const auto stats = m.device_stats();
                CHECK(sum(stats.misses) > 0 && sum(stats.requests) > 0 && sum(stats.demand_bytes) > 0);
                CHECK(stats.resident_bytes <= stats.capacity_bytes);
                CHECK(stats.resident_experts <= stats.capacity_experts);
                CHECK((stats.evictions > 0) == (device_share < 1));
                CHECK(sum(stats.host_misses) <= sum(stats.misses));
                CHECK(share < 1 || device_share == 1 || sum(stats.host_misses) < sum(stats.misses));
                CHECK((stats.pinned_bytes > 0) == (device != "host-unpinned"));
                CHECK(stats.wait_seconds[S2MOE_PHASE_PREFILL] > 0);
                CHECK(stats.copy_seconds[S2MOE_PHASE_PREFILL] > 0);
            }
        }
    }
}

// What lies in slots costs no word to the host.
void test_resident_experts_ask_nothing() {
    const device_model m(1);
    const auto expected = transcript(m);
    const auto before = m.device_stats();
    CHECK(before.resident_experts <= m.everything().size());
    CHECK(transcript(m) == expected);
    const auto after = m.device_stats();
    CHECK(sum(after.requests) == sum(before.requests) && sum(after.demand_bytes) == sum(before.demand_bytes));
    // the end of each decode alone
    CHECK(after.synchronizations[S2MOE_PHASE_PREFILL] == before.synchronizations[S2MOE_PHASE_PREFILL] + 1);
    CHECK(after.synchronizations[S2MOE_PHASE_DECODE] == before.synchronizations[S2MOE_PHASE_DECODE] + 23);
    CHECK(sum(after.misses) == sum(before.misses) && sum(after.hits) > sum(before.hits));
    s2moe_expert_stats stats = m.stats();
    CHECK(sum(stats.hits) == sum(after.hits) && sum(stats.misses) == sum(after.misses));
    std::vector<uint64_t> counts(m.everything().size());
    CHECK(s2moe_experts_counts(m.experts, counts.data(), static_cast<int64_t>(counts.size())) == S2MOE_OK);
    uint64_t n_uses = 0;
    for (const uint64_t count : counts) {
        n_uses += count;
    }
    // of the 8 and the 22 single tokens, twice
    CHECK(n_uses == static_cast<uint64_t>(2 * 30 * m.n_moe_layer() * m.info().n_expert_used));
}

void test_promotes_what_the_host_has() {
    const auto expected = expected_transcript();
    const device_model m(1, 1);
    CHECK(transcript(m) == expected);
    const auto ids = m.everything();
    const auto n_ids = static_cast<int32_t>(ids.size());
    // the host has read all that it was asked for; the rest first goes there
    for (int i = 0; i < 500 && m.stats().resident_experts < ids.size(); ++i) {
        CHECK(s2moe_experts_prefetch(m.experts, ids.data(), n_ids, S2MOE_PRIORITY_PREFETCH, nullptr) == S2MOE_OK);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(s2moe_experts_prefetch(m.experts, ids.data(), n_ids, S2MOE_PRIORITY_PREFETCH, nullptr) == S2MOE_OK);
    CHECK(m.n_at_hand() == n_ids);
    const auto before = m.device_stats();
    CHECK(transcript(m) == expected);
    CHECK(sum(m.device_stats().misses) == sum(before.misses));
    CHECK(m.device_stats().resident_experts == ids.size());
}

// Predictions come and go under pressure; some are used while they are still on their way.
void test_promotes_under_pressure() {
    const auto expected = expected_transcript();
    const device_model m(0.3, 1);
    CHECK(transcript(m) == expected);
    const auto tokens = m.tokens(60);
    const auto ids = m.everything();
    m.clear();
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 8, 0, true) == S2MOE_OK);
    CHECK(s2moe_decode(m.ctx.get(), &tokens[8], 30, 8, true) == S2MOE_OK);
    std::vector<float> result;
    uint32_t at = 3;
    for (int32_t i = 38; i < 60; ++i) {
        for (int j = 0; j < 3; ++j) {
            at = at * 1664525 + 1013904223;
            const auto * some = &ids[at % (ids.size() - 6)];
            CHECK(s2moe_experts_pin(m.experts, some, 6) == S2MOE_OK);
            CHECK(s2moe_experts_prefetch(m.experts, some, 6, S2MOE_PRIORITY_PREFETCH, nullptr) == S2MOE_OK);
        }
        CHECK(s2moe_decode(m.ctx.get(), &tokens[i], 1, i, true) == S2MOE_OK);
        const auto row = m.logits();
        result.insert(result.end(), row.begin(), row.end());
    }
    CHECK(std::equal(result.begin(), result.end(), expected.begin() + 38 * m.n_vocab()));
    const auto stats = m.device_stats();
    CHECK(stats.promoted_bytes > 0 && sum(stats.prefetched) > 0);
    CHECK(stats.resident_bytes <= stats.capacity_bytes);
}

std::vector<s2moe_expert_id> experts_of_last_layer(const device_model & m) {
    std::vector<s2moe_expert_id> ids = m.everything();
    std::erase_if(ids, [&](const s2moe_expert_id & id) { return id.layer != m.n_moe_layer() - 1; });
    return ids;
}

// Predictions for other layers take every slot that a prompt's layer needs: it waits for them instead of failing.
void test_flights_give_way() {
    const auto expected = expected_transcript();
    const device_model m(0, 0);
    const auto tokens = m.tokens(60);
    const auto last_layer = experts_of_last_layer(m);
    const auto n_ids = static_cast<int32_t>(last_layer.size());
    m.clear();
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 8, 0, true) == S2MOE_OK);
    for (int i = 0; i < 50; ++i) { // until some are in the host's memory, and then on their way
        CHECK(s2moe_experts_prefetch(m.experts, last_layer.data(), n_ids, S2MOE_PRIORITY_PREFETCH, nullptr) ==
              S2MOE_OK);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(m.device_stats().promotions > 0);
    CHECK(s2moe_decode(m.ctx.get(), &tokens[8], 30, 8, true) == S2MOE_OK);
    for (int32_t i = 0; i < 30; ++i) {
        const auto row = m.logits(i);
        CHECK(std::equal(row.begin(), row.end(), expected.begin() + (8 + i) * m.n_vocab()));
    }
}

// The expert whose copy beside the computation broke off is fetched when it is needed, and counts as zero in no decode.
void test_survives_a_failed_copy() {
    const auto expected = expected_transcript();
    const device_model m(1, 1, "host-failed-copy");
    const auto ids = m.everything();
    const auto n_ids = static_cast<int32_t>(ids.size());
    int32_t status = S2MOE_OK;
    for (int i = 0; i < 500 && status == S2MOE_OK; ++i) {
        status = s2moe_experts_prefetch(m.experts, ids.data(), n_ids, S2MOE_PRIORITY_PREFETCH, nullptr);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(status == S2MOE_ERROR_INTERNAL);
    CHECK(transcript(m) == expected);
    const auto before = m.device_stats();
    CHECK(transcript(m) == expected);
    CHECK(sum(m.device_stats().requests) == sum(before.requests));
}

// Neither its slot nor its place in the cache is lost, where every one is needed.
void test_a_failed_copy_leaves_room() {
    const auto expected = expected_transcript();
    const device_model m(0, 0, "host-failed-copy");
    const auto tokens = m.tokens(9);
    const auto last_layer = experts_of_last_layer(m);
    const auto n_ids = static_cast<int32_t>(last_layer.size());
    m.clear();
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 8, 0, true) == S2MOE_OK);
    int32_t status = S2MOE_OK;
    for (int i = 0; i < 500 && status == S2MOE_OK; ++i) {
        status = s2moe_experts_prefetch(m.experts, last_layer.data(), n_ids, S2MOE_PRIORITY_PREFETCH, nullptr);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(status == S2MOE_ERROR_INTERNAL);
    CHECK(transcript(m) == expected);
}

void test_speculates() {
    const device_model m(0.3);
    int32_t status = 1;
    s2moe_speculator * speculator = s2moe_speculator_create(m.ctx.get(), nullptr, nullptr, &status);
    CHECK(speculator != nullptr && status == S2MOE_OK);
    const auto prompt = m.tokens(9);
    std::vector<std::vector<int32_t>> texts;
    constexpr const char * exact = R"({"preset": "exact", "adaptive": false})";
    constexpr const char * balanced = R"({"preset": "balanced", "adaptive": false})";
    for (const char * options : {"", exact, balanced}) {
        m.clear();
        CHECK(s2moe_decode(m.ctx.get(), prompt.data(), 8, 0, false) == S2MOE_OK);
        s2moe_sampler * sampler = s2moe_sampler_create(m.model.get(), R"({"temperature": 0})", nullptr, nullptr);
        std::vector<int32_t> text;
        int32_t token = prompt.back();
        if (*options != '\0') {
            CHECK(s2moe_speculator_begin(speculator, options) == S2MOE_OK);
        }
        while (text.size() < 60) {
            const auto position = static_cast<int32_t>(8 + text.size());
            int32_t chosen[S2MOE_N_VERIFY_ROWS] = {};
            int32_t n = 1;
            if (*options == '\0') {
                CHECK(s2moe_decode(m.ctx.get(), &token, 1, position, false) == S2MOE_OK);
                CHECK(s2moe_sampler_sample(sampler, m.ctx.get(), -1, chosen) == S2MOE_OK);
            } else {
                const auto left = static_cast<int32_t>(60 - text.size());
                CHECK(s2moe_speculator_step(speculator, sampler, token, position, left, chosen, &n) == S2MOE_OK);
            }
            text.insert(text.end(), chosen, chosen + n);
            token = text.back();
        }
        s2moe_sampler_free(sampler);
        texts.push_back(text);
    }
    CHECK(texts[1] == texts[0]);
    s2moe_speculator_free(speculator);
}

void test_refusals() {
    stored_model m("", 0.5, 128, 1, false);
    const uint64_t floor = s2moe_experts_device_floor_bytes(m.experts);
    char * json = nullptr;
    CHECK(s2moe_experts_device(m.experts, &json) == S2MOE_ERROR_INVALID);
    for (const char * device : {"", "cpu", "cuda", "cuda:", "cuda:x", "cuda:1x", "cuda:-"}) {
        CHECK(s2moe_experts_use_device(m.experts, m.ctx.get(), device, floor) == S2MOE_ERROR_INVALID);
    }
    CHECK(s2moe_experts_use_device(m.experts, m.ctx.get(), "cuda:99", floor) == S2MOE_ERROR_UNSUPPORTED);
    CHECK(s2moe_experts_use_device(m.experts, m.ctx.get(), "host", floor - 1) == S2MOE_ERROR_INVALID);
    const test_model other(128);
    CHECK(s2moe_experts_use_device(m.experts, other.ctx.get(), "host", floor) == S2MOE_ERROR_INVALID);
    m.allocate(0.5); // nothing has been joined by all that
    const uint64_t capacity = m.stats().capacity_bytes;
    CHECK(s2moe_experts_use_device(m.experts, m.ctx.get(), "host", floor) == S2MOE_OK);
    CHECK(s2moe_experts_use_device(m.experts, m.ctx.get(), "host", floor) == S2MOE_ERROR_INVALID);
    CHECK(s2moe_experts_allocate(m.experts, 2 * capacity) == S2MOE_ERROR_INVALID);
    CHECK(s2moe_experts_shrink(m.experts, 0) == capacity);
    CHECK(s2moe_experts_grow(m.experts, UINT64_MAX) == capacity);
    CHECK(s2moe_experts_device(m.experts, &json) == S2MOE_OK);
    CHECK(std::string(json).find("\"CPU\"") != std::string::npos);
    s2moe_string_free(json);

    const stored_model with_list(R"({"policy": "static"})", 0.5, 128, 1, false);
    CHECK(s2moe_experts_use_device(with_list.experts, with_list.ctx.get(), "host", floor) == S2MOE_ERROR_INVALID);
}

void test_any_thread() {
    const auto expected = expected_transcript();
    const device_model m(0.3, 0.6);
    const auto ids = m.everything();
    std::atomic<bool> done = false;
    std::thread asking([&] {
        for (uint32_t at = 1; !done; at = at * 1664525 + 1013904223) {
            const auto * some = &ids[at % (ids.size() - 4)];
            CHECK(s2moe_experts_prefetch(m.experts, some, 4, S2MOE_PRIORITY_PREFETCH, nullptr) == S2MOE_OK);
            CHECK(s2moe_experts_pin(m.experts, some, 2) == S2MOE_OK);
            CHECK(m.n_at_hand() <= static_cast<int>(ids.size()));
            const auto stats = m.device_stats();
            CHECK(stats.resident_experts <= stats.capacity_experts);
            CHECK(m.stats().resident_bytes <= m.stats().capacity_bytes);
            s2moe_experts_cancel_prefetches(m.experts);
            std::this_thread::yield();
        }
    });
    for (int i = 0; i < 5; ++i) {
        CHECK(transcript(m) == expected);
    }
    done = true;
    asking.join();
}

void test_abort() {
    const auto expected = expected_transcript();
    const device_model m(0);
    const auto tokens = m.tokens(32);
    s2moe_abort * abort = s2moe_abort_create(m.ctx.get());
    {
        abort_storm storm(abort);
        for (int i = 0; i < 60; ++i) {
            m.clear();
            const int32_t status = s2moe_decode(m.ctx.get(), tokens.data(), 32, 0, false);
            CHECK(status == S2MOE_OK || status == S2MOE_ERROR_ABORTED);
        }
    }
    s2moe_abort_clear(abort);
    CHECK(transcript(m) == expected);
    llama_set_abort_callback(m.ctx.get(), nullptr, nullptr);
    s2moe_abort_free(abort);
}

} // namespace

int main() {
    llama_backend_init();
    test_equals_a_plain_load();
    test_resident_experts_ask_nothing();
    test_promotes_what_the_host_has();
    test_promotes_under_pressure();
    test_flights_give_way();
    test_survives_a_failed_copy();
    test_a_failed_copy_leaves_room();
    test_speculates();
    test_refusals();
    test_any_thread();
    test_abort();
    return 0;
}

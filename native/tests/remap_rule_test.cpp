// Ids become slots as the table says, whatever computes the rule, and what has no slot is asked for once.

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <thread>

#include "check.h"
#include "remap_rule.h"
#include "test_lanes.h"

using namespace s2moe;

namespace {

// A table of slots with the host behind it, which answers each request with slots for what is missing.
class test_table {
  public:
    test_table(int n_layer, int n_expert) : table(n_layer * n_expert, -1), n_rows(table.size()) {
        state = {.n_layer = n_layer,
                 .n_expert = n_expert,
                 .control = &control,
                 .table = table.data(),
                 .fetches = fetches.data(),
                 .timer = &timer,
                 .n_rows = n_rows.data(),
                 .mailbox = mailbox.get()};
        host = std::thread([this] { serve(); });
    }
    ~test_table() {
        done = true;
        host.join();
    }
    test_table(const test_table &) = delete;
    test_table & operator=(const test_table &) = delete;

    int32_t & slot(int layer, int expert) {
        return table[layer * state.n_expert + expert];
    }

    remap_control control;
    remap_timer timer;
    std::vector<int32_t> table;
    std::vector<int32_t> n_rows;
    std::vector<slot_fetch> fetches = std::vector<slot_fetch>(max_fetches);
    std::unique_ptr<remap_mailbox> mailbox = std::make_unique<remap_mailbox>();
    remap_state state;
    int n_requests = 0;             // of the host's
    std::set<int> asked;            // experts that the last request missed
    bool answers_with_slots = true; // false: as after a failed read

  private:
    void serve() {
        uint32_t answered = 0;
        while (!done) {
            const uint32_t request = std::atomic_ref<uint32_t>(mailbox->request).load(std::memory_order_acquire);
            if (request == answered) {
                std::this_thread::yield();
                continue;
            }
            ++n_requests;
            asked.clear();
            mailbox->n_changes = mailbox->n_fetches = 0;
            for (int e = 0; e < state.n_expert && mailbox->n_unknown == 0; ++e) {
                if (mailbox->n_rows[e] > 0 && slot(mailbox->layer, e) < 0) {
                    asked.insert(e);
                    if (answers_with_slots) {
                        mailbox->changes[mailbox->n_changes++] = {mailbox->layer, e, 1000 + e};
                    }
                }
            }
            for (int layer = 0; layer < state.n_layer && !asked.empty(); ++layer) {
                if (layer != mailbox->layer) { // whoever gave way
                    mailbox->changes[mailbox->n_changes++] = {layer, *asked.begin(), -1};
                }
            }
            mailbox->n_fetches = static_cast<int32_t>(asked.size());
            for (int i = 0; i < mailbox->n_fetches; ++i) {
                mailbox->fetches[i].n_bytes = answered + i;
            }
            answered = request;
            std::atomic_ref<uint32_t>(mailbox->answer).store(request, std::memory_order_release);
        }
    }

    std::atomic<bool> done = false;
    std::thread host;
};

struct test_ids {
    test_ids(int n_tokens, int n_ids, int stride) : n_tokens(n_tokens), n_ids(n_ids), stride(stride) {
        values.resize(n_tokens * stride, -77); // between the rows lies what must not be read
        slots.resize(n_tokens * n_ids, -99);
    }

    remap_call call(int layer, int n_expert) {
        remap_call result;
        result.layer = layer;
        result.n_expert = n_expert;
        result.n_ids = n_ids;
        result.n_tokens = n_tokens;
        result.zero_slot = 555;
        result.ids = reinterpret_cast<const std::byte *>(values.data());
        result.id_stride = sizeof(int32_t);
        result.token_stride = stride * sizeof(int32_t);
        result.slots = slots.data();
        return result;
    }
    int32_t & id(int token, int i) {
        return values[token * stride + i];
    }

    int n_tokens;
    int n_ids;
    int stride;
    std::vector<int32_t> values;
    std::vector<int32_t> slots;
};

using runner = std::function<void(const remap_state &, const remap_call &)>;

template <typename lanes_type> runner in_one_thread() {
    return [](const remap_state & state, const remap_call & call) {
        lanes_type lanes;
        remap_memory memory;
        std::memset(static_cast<void *>(&memory), 0x01, sizeof(memory));
        remap_layer(lanes, state, call, memory);
    };
}

void in_threads(const remap_state & state, const remap_call & call) {
    remap_memory memory;
    std::memset(static_cast<void *>(&memory), 0x01, sizeof(memory));
    run_block(thread_block::most_threads, [&](thread_lanes & lanes) { remap_layer(lanes, state, call, memory); });
}

void test_maps(const runner & run, int n_rounds) {
    std::mt19937 random(7);
    const auto below = [&](int n) { return static_cast<int>(random() % n); };
    int n_waited = 0;
    int n_drafted = 0;
    int n_unknown = 0;
    for (int round = 0; round < n_rounds; ++round) {
        const int n_layer = 1 + below(3);
        const int n_expert_max = 1 + below(round % 10 == 0 ? max_remap_experts : 40);
        test_table table(n_layer, n_expert_max);
        for (int batch = 0; batch < 4; ++batch) {
            const int layer = below(n_layer);
            const int n_expert = 1 + below(n_expert_max);
            test_ids ids(1 + below(20), 1 + below(8), 0);
            ids = test_ids(ids.n_tokens, ids.n_ids, ids.n_ids + below(3));
            const bool spoil = below(5) == 0;
            std::vector<int32_t> rows(n_expert);
            int unknown = 0;
            for (int t = 0; t < ids.n_tokens; ++t) {
                for (int i = 0; i < ids.n_ids; ++i) {
                    const int wrong[] = {-1, n_expert, INT32_MAX, INT32_MIN};
                    ids.id(t, i) = spoil && below(6) == 0 ? wrong[below(4)] : below(n_expert);
                    const bool known = ids.id(t, i) >= 0 && ids.id(t, i) < n_expert;
                    unknown += !known;
                    rows[known ? ids.id(t, i) : 0] += known;
                }
            }
            for (int e = 0; e < n_expert; ++e) {
                if (below(2) == 0) {
                    table.slot(layer, e) = below(3) == 0 ? -1 : 2 * e + 1;
                }
            }
            table.control.drafting = below(3) == 0;
            table.answers_with_slots = below(6) != 0;
            std::set<int> missing;
            for (int e = 0; e < n_expert; ++e) {
                if (rows[e] > 0 && table.slot(layer, e) < 0) {
                    missing.insert(e);
                }
            }
            auto expected = table.table;
            const bool asks = unknown > 0 || (!missing.empty() && !table.control.drafting);
            for (const int e : missing) {
                if (asks && unknown == 0 && table.answers_with_slots) {
                    expected[layer * n_expert_max + e] = 1000 + e;
                }
            }
            for (int other = 0; other < n_layer && asks && unknown == 0; ++other) {
                if (other != layer) {
                    expected[other * n_expert_max + *missing.begin()] = -1;
                }
            }
            std::fill_n(table.mailbox->n_rows, max_remap_experts, 0);
            const int before = table.n_requests;
            std::fill(table.n_rows.begin(), table.n_rows.end(), 0);
            table.timer = asks ? remap_timer{.begin = 100, .end = 107} : remap_timer();
            run(table.state, ids.call(layer, n_expert));
            CHECK(table.n_requests == before + asks);
            CHECK(!asks || table.mailbox->copy_nanoseconds == 7);
            CHECK(table.timer.begin == UINT64_MAX && table.timer.end == 0); // for the fetches of this layer
            CHECK(table.table == expected);
            if (asks) {
                CHECK(table.mailbox->layer == layer && table.mailbox->n_tokens == ids.n_tokens);
                CHECK(table.mailbox->n_unknown == unknown);
                CHECK(std::equal(rows.begin(), rows.end(), table.mailbox->n_rows));
                CHECK(unknown > 0 || table.asked == missing);
                CHECK(table.control.n_fetches == static_cast<int>(table.asked.size()));
                for (int i = 0; i < table.control.n_fetches; ++i) {
                    CHECK(table.fetches[i].n_bytes == table.mailbox->fetches[i].n_bytes);
                }
            } else {
                CHECK(table.control.n_fetches == 0);
            }
            for (int e = 0; e < n_expert; ++e) {
                CHECK(table.n_rows[layer * n_expert_max + e] == rows[e]);
            }
            for (int t = 0; t < ids.n_tokens; ++t) {
                for (int i = 0; i < ids.n_ids; ++i) {
                    const int32_t id = ids.id(t, i);
                    const bool known = id >= 0 && id < n_expert;
                    const int32_t slot = known ? expected[layer * n_expert_max + id] : -1;
                    CHECK(ids.slots[t * ids.n_ids + i] == (slot < 0 ? 555 + i : slot));
                }
            }
            n_waited += asks && unknown == 0;
            n_drafted += !missing.empty() && table.control.drafting;
            n_unknown += unknown > 0;
        }
    }
    CHECK(n_waited > n_rounds / 2 && n_drafted > n_rounds / 4 && n_unknown > n_rounds / 4);
}

// Several threads copy each byte once, whatever the matrices' ends suit.
void test_fetches() {
    std::mt19937 random(9);
    for (const size_t step : {16, 4, 1}) {
        std::vector<std::byte> memory(1 << 16);
        for (std::byte & each : memory) {
            each = static_cast<std::byte>(random());
        }
        const auto base = reinterpret_cast<std::byte *>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16);
        std::vector<std::byte> copies(1 << 16);
        const auto target = reinterpret_cast<std::byte *>((reinterpret_cast<uintptr_t>(copies.data()) + 15) / 16 * 16);
        slot_fetch fetches[4];
        remap_control control;
        const remap_state state = {.control = &control, .fetches = fetches};
        const size_t sizes[] = {step, 7 * step, 1000 * step, 333 * step};
        size_t from = step;
        size_t to = 5 * step;
        for (const size_t n_bytes : sizes) {
            fetches[control.n_fetches++] = {base + from, target + to, n_bytes};
            from += n_bytes + step;
            to += n_bytes + 3 * step;
        }
        auto expected = copies;
        std::byte * expected_target = expected.data() + (target - copies.data());
        for (int i = 0; i < control.n_fetches; ++i) {
            const slot_fetch & fetch = fetches[i];
            std::memcpy(expected_target + (fetch.to - target), fetch.from, fetch.n_bytes);
        }
        for (uint64_t i = 0; i < 37; ++i) {
            fetch_slots(state, i, 37);
        }
        CHECK(copies == expected);
        control.n_fetches = 0;
        std::fill(copies.begin(), copies.end(), std::byte{3});
        fetch_slots(state, 0, 1);
        CHECK(copies == std::vector<std::byte>(copies.size(), std::byte{3}));
    }
}

} // namespace

int main() {
    test_maps(in_one_thread<one_lane>(), 300);
    test_maps(in_one_thread<shuffled_lanes>(), 300);
    test_maps(in_threads, 40);
    test_fetches();
    return 0;
}

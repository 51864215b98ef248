// s2moe_decode: all or nothing, and abortable from another thread.

#include "check.h"

namespace {

llama_pos last_position(const test_model & m) {
    return llama_memory_seq_pos_max(llama_get_memory(m.ctx.get()), 0);
}

void test_rejects_bad_arguments() {
    const test_model m(128, 32);
    const auto tokens = m.tokens(33);
    llama_context * ctx = m.ctx.get();
    CHECK(s2moe_decode(ctx, nullptr, 1, 0, false) == S2MOE_ERROR_INVALID);
    CHECK(s2moe_decode(ctx, tokens.data(), 0, 0, false) == S2MOE_ERROR_INVALID);
    CHECK(s2moe_decode(ctx, tokens.data(), 33, 0, false) == S2MOE_ERROR_INVALID);
    CHECK(s2moe_decode(ctx, tokens.data(), 1, 1, false) == S2MOE_ERROR_INVALID);
    const int32_t outside = m.n_vocab();
    CHECK(s2moe_decode(ctx, &outside, 1, 0, false) == S2MOE_ERROR_INVALID);
    CHECK(last_position(m) == -1);
}

void test_full_context_keeps_the_cache() {
    const test_model m(256, 64);
    const auto tokens = m.tokens(64);
    const auto n_ctx = static_cast<int32_t>(llama_n_ctx(m.ctx.get()));
    int32_t n = 0;
    for (; n + 64 <= n_ctx; n += 64) {
        CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 64, n, false) == S2MOE_OK);
    }
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 64, n, false) == S2MOE_ERROR_CONTEXT_FULL);
    CHECK(last_position(m) == n - 1);
}

void test_abort_keeps_the_cache_and_the_text() {
    const test_model m(256, 64);
    const auto tokens = m.tokens(64);
    s2moe_abort * abort = s2moe_abort_create(m.ctx.get());
    CHECK(abort != nullptr);
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 64, 0, false) == S2MOE_OK);
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 8, 64, false) == S2MOE_OK);
    const auto expected = m.logits();
    CHECK(llama_memory_seq_rm(llama_get_memory(m.ctx.get()), 0, 64, -1));

    s2moe_abort_request(abort);
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 8, 64, false) == S2MOE_ERROR_ABORTED);
    CHECK(last_position(m) == 63);
    s2moe_abort_clear(abort);

    // thrown by another thread at any moment of many decodes
    abort_storm storm(abort);
    int n_aborted = 0;
    for (int i = 0; i < 300; ++i) {
        const int32_t status = s2moe_decode(m.ctx.get(), tokens.data(), 8, 64, false);
        CHECK(status == S2MOE_OK || status == S2MOE_ERROR_ABORTED);
        n_aborted += status == S2MOE_ERROR_ABORTED;
        CHECK(last_position(m) == (status == S2MOE_OK ? 71 : 63));
        CHECK(llama_memory_seq_rm(llama_get_memory(m.ctx.get()), 0, 64, -1));
    }
    storm.end();
    CHECK(n_aborted > 0);
    s2moe_abort_clear(abort);
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 8, 64, false) == S2MOE_OK);
    CHECK(m.logits() == expected);
    llama_set_abort_callback(m.ctx.get(), nullptr, nullptr);
    s2moe_abort_free(abort);
}

} // namespace

int main() {
    test_rejects_bad_arguments();
    test_full_context_keeps_the_cache();
    test_abort_keeps_the_cache_and_the_text();
    return 0;
}

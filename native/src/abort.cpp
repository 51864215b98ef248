#include "abort.h"

#include "error.h"
#include "llama-grammar.h"
#include "llama.h"

namespace {

bool is_requested(void * abort) {
    return static_cast<s2moe_abort *>(abort)->requested.load(std::memory_order_relaxed);
}

} // namespace

namespace s2moe {

grammar_abort::grammar_abort(s2moe_abort * abort) {
    llama_grammar_set_abort_callback(abort == nullptr ? nullptr : is_requested, abort);
}

grammar_abort::~grammar_abort() {
    llama_grammar_set_abort_callback(nullptr, nullptr);
}

} // namespace s2moe

s2moe_abort * s2moe_abort_create(llama_context * ctx) {
    s2moe_abort * abort = nullptr;
    s2moe::guard(S2MOE_ERROR_NO_MEMORY, [&] { abort = new s2moe_abort; });
    if (abort != nullptr) {
        llama_set_abort_callback(ctx, is_requested, abort);
    }
    return abort;
}

void s2moe_abort_free(s2moe_abort * abort) {
    delete abort;
}

void s2moe_abort_request(s2moe_abort * abort) {
    abort->requested.store(true, std::memory_order_relaxed);
}

void s2moe_abort_clear(s2moe_abort * abort) {
    abort->requested.store(false, std::memory_order_relaxed);
}

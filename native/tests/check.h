// What the C++ tests share: CHECK, and a small model opened with llama.h.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "llama.h"
#include "s2moe.h"

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::fprintf(                                                                                              \
                stderr, "%s:%d: %s is false; last error: %s\n", __FILE__, __LINE__, #condition, s2moe_last_error());   \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (false)

inline const char * test_model_path() {
    const char * path = std::getenv("S2MOE_TEST_MODEL");
    if (path == nullptr) {
        std::fprintf(stderr, "set S2MOE_TEST_MODEL to a small MoE GGUF\n");
        std::exit(1);
    }
    return path;
}

// A number of a JSON object without spaces.
inline double number_in(const std::string & json, const std::string & key) {
    const size_t at = json.find("\"" + key + "\":");
    CHECK(at != std::string::npos);
    return std::strtod(json.c_str() + at + key.size() + 3, nullptr);
}

// Another thread that throws a switch at any moment and takes it back, until end().
class abort_storm {
  public:
    explicit abort_storm(s2moe_abort * abort)
        : thread([this, abort] {
              while (!done) {
                  s2moe_abort_request(abort);
                  std::this_thread::sleep_for(std::chrono::microseconds(300));
                  s2moe_abort_clear(abort);
                  std::this_thread::sleep_for(std::chrono::microseconds(200));
              }
          }) {
    }
    ~abort_storm() {
        end();
    }

    // The switch is cleared then.
    void end() {
        done = true;
        if (thread.joinable()) {
            thread.join();
        }
    }

  private:
    std::atomic<bool> done = false;
    std::thread thread;
};

struct test_model {
    std::unique_ptr<llama_model, void (*)(llama_model *)> model{nullptr, llama_model_free};
    std::unique_ptr<llama_context, void (*)(llama_context *)> ctx{nullptr, llama_free};

    explicit test_model(uint32_t n_ctx = 256, uint32_t n_batch = 64, bool repacks = true, int32_t n_gpu_layers = 0) {
        llama_model_params params = llama_model_default_params();
        params.use_extra_bufts = repacks;
        params.n_gpu_layers = n_gpu_layers;
        load(params, n_ctx, n_batch);
    }

  protected:
    struct unloaded {};

    explicit test_model(unloaded) {
    }

    void load(llama_model_params model_params,
              uint32_t n_ctx,
              uint32_t n_batch,
              uint32_t n_sequences = 1,
              const char * path = test_model_path()) {
        llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
        llama_backend_init();
        if (model_params.n_gpu_layers > 0) { // on the first GPU, however many there are
            model_params.split_mode = LLAMA_SPLIT_MODE_NONE;
            model_params.main_gpu = 0;
        }
        model.reset(llama_model_load_from_file(path, model_params));
        CHECK(model != nullptr);
        llama_context_params params = llama_context_default_params();
        params.n_ctx = n_ctx;
        params.n_batch = params.n_ubatch = n_batch;
        params.n_threads = params.n_threads_batch = 2;
        params.n_seq_max = n_sequences;
        params.kv_unified = n_sequences > 1;
        ctx.reset(llama_init_from_model(model.get(), params));
        CHECK(ctx != nullptr);
    }

  public:
    int32_t n_vocab() const {
        return llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
    }

    // n tokens that differ
    std::vector<int32_t> tokens(int32_t n) const {
        std::vector<int32_t> ids;
        for (int32_t i = 0; i < n; ++i) {
            ids.push_back((7 + 13 * i) % n_vocab());
        }
        return ids;
    }

    std::vector<float> logits(int32_t index = -1) const {
        const float * row = llama_get_logits_ith(ctx.get(), index);
        CHECK(row != nullptr);
        return {row, row + n_vocab()};
    }

    void clear() const {
        llama_memory_clear(llama_get_memory(ctx.get()), true);
    }
};

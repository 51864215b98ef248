// The expert store's part of s2moe.h.

#include <algorithm>
#include <charconv>
#include <map>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "cache.h"
#include "decode.h"
#include "device/tier.h"
#include "error.h"
#include "json.h"
#include "llama-ext.h"
#include "llama-moe.h"
#include "llama.h"
#include "matmul.h"
#include "s2moe.h"

using s2moe::failure;
using s2moe::guard;

struct s2moe_experts {
    s2moe_experts(const char * path, const s2moe::cache_options & options) : cache(read_layout(path), options) {
        buffer_type = s2moe::acquire_expert_buffer_type(&cache);
        overrides[0] = {R"(blk\.\d+\.ffn_(up|gate|gate_up|down)_exps\.weight)", buffer_type};
        overrides[1] = {nullptr, nullptr};
    }
    ~s2moe_experts() {
        s2moe::release_expert_buffer_type(buffer_type);
    }
    s2moe_experts(const s2moe_experts &) = delete;
    s2moe_experts & operator=(const s2moe_experts &) = delete;

    static s2moe::expert_layout read_layout(const char * path) {
        s2moe::expert_layout layout = s2moe::expert_layout::read(path);
        if (layout.layers.empty()) {
            throw failure(S2MOE_ERROR_UNSUPPORTED, std::string(path) + ": the model has no experts");
        }
        return layout;
    }

    s2moe::expert_cache cache;
    ggml_backend_buffer_type_t buffer_type = nullptr;
    llama_model_tensor_buft_override overrides[2] = {};
    std::unique_ptr<s2moe::device_tier> device; // before the cache
};

namespace {

s2moe::cache_options read_options(const char * json) {
    const common_json options = common_json::parse(json == nullptr || *json == '\0' ? "{}" : json);
    if (!options.is_object()) {
        throw failure(S2MOE_ERROR_INVALID, "the options are no JSON object");
    }
    s2moe::cache_options result;
    const auto choice = [&](const char * key, std::string & value, std::initializer_list<const char *> allowed) {
        if (!options.contains(key)) {
            return;
        }
        value = options.at(key).get<std::string>();
        for (const char * each : allowed) {
            if (value == each) {
                return;
            }
        }
        throw failure(S2MOE_ERROR_INVALID, std::string(key) + " is \"" + value + "\", which is unknown");
    };
    choice("io", result.io, {"auto", "direct", "buffered"});
    choice("reader", result.reader, {"auto", "io_uring", "threads"});
    choice("policy", result.policy, {"cache", "static"});
    if (options.contains("queue_depth")) {
        result.queue_depth = options.at("queue_depth").get<int>();
        if (result.queue_depth < 1 || result.queue_depth > 256) {
            throw failure(S2MOE_ERROR_INVALID, "queue_depth must be 1 to 256");
        }
    }
    return result;
}

bool is_gpu(ggml_backend_dev_t device) {
    const auto type = ggml_backend_dev_type(device);
    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

// The device for slots of the context's experts: "cuda:N", or for tests the CPU, with what it cannot do in its name.
std::unique_ptr<s2moe::device_memory> create_device(const std::string & name,
                                                    [[maybe_unused]] const llama_context * ctx) {
    static const std::map<std::string, s2moe::host_abilities> hosts = {{"host", {}},
                                                                       {"host-unpinned", {.n_pins = 0}},
                                                                       {"host-part-pinned", {.n_pins = 1}},
                                                                       {"host-failed-copy", {.n_copies_until = 1}},
                                                                       {"host-watched", {.has_watchdog = true}}};
    if (const auto host = hosts.find(name); host != hosts.end()) {
        return s2moe::create_host_device(host->second);
    }
    static const std::string cuda = "cuda:";
    int number = -1;
    const char * first = name.data() + std::min(cuda.size(), name.size());
    const char * last = name.data() + name.size();
    const auto [end, error] = std::from_chars(first, last, number);
    if (!name.starts_with(cuda) || error != std::errc() || end != last || number < 0) {
        throw failure(S2MOE_ERROR_INVALID, "device is \"" + name + "\"; it must be \"cuda:N\"");
    }
#if S2MOE_CUDA_ENABLED
    auto created = s2moe::create_cuda_device(number);
    if (const int32_t computes = llama_moe_gpu(ctx); computes != number) {
        throw failure(S2MOE_ERROR_INVALID,
                      "device is \"" + name + "\", but the context computes on " +
                          (computes < 0 ? "no or several GPUs" : "cuda:" + std::to_string(computes)) +
                          "; load the model with split_mode none and that GPU as main_gpu");
    }
    return created;
#else
    throw failure(S2MOE_ERROR_UNSUPPORTED, "this build has no CUDA; build it with `make cuda`");
#endif
}

int checked_layer(const s2moe_experts * experts, int32_t layer, int64_t n_expert) {
    const int index = experts->cache.layer_index(layer);
    if (index < 0) {
        throw failure(S2MOE_ERROR_INVALID, "layer " + std::to_string(layer) + " has no experts in the store");
    }
    const int n = experts->cache.layout.layers[index].n_expert;
    if (n_expert != n) {
        throw failure(S2MOE_ERROR_INVALID,
                      "n_expert is " + std::to_string(n_expert) + ", the layer has " + std::to_string(n));
    }
    return index;
}

void check_counts(const s2moe_experts * experts, int64_t n) {
    const auto wanted = static_cast<int64_t>(experts->cache.layout.layers.size()) * experts->cache.n_expert_max();
    if (n != wanted) {
        throw failure(S2MOE_ERROR_INVALID,
                      "n is " + std::to_string(n) + ", the store has " + std::to_string(wanted) + " counts");
    }
}

void check_count(const char * name, int64_t n) {
    if (n < 0) {
        throw failure(S2MOE_ERROR_INVALID, std::string(name) + " is negative");
    }
}

} // namespace

int32_t s2moe_model_layout(const char * path, char ** layout_json) {
    return guard(S2MOE_ERROR_IO,
                 [&] { *layout_json = s2moe::copy_string(s2moe::expert_layout::read(path).to_json()); });
}

s2moe_experts * s2moe_experts_open(const char * path, const char * options_json, int32_t * last_status) {
    s2moe_experts * result = nullptr;
    const int32_t status =
        guard(S2MOE_ERROR_INVALID, [&] { result = new s2moe_experts(path, read_options(options_json)); });
    if (last_status != nullptr) {
        *last_status = status;
    }
    return result;
}

void s2moe_experts_free(s2moe_experts * experts) {
    delete experts;
}

const void * s2moe_experts_overrides(const s2moe_experts * experts) {
    return experts->overrides;
}

int32_t s2moe_experts_allocate(s2moe_experts * experts, uint64_t capacity_bytes) {
    return guard(S2MOE_ERROR_INTERNAL, [&] { experts->cache.allocate(capacity_bytes); });
}

uint64_t s2moe_experts_floor_bytes(const s2moe_experts * experts) {
    return experts->cache.floor_bytes();
}

uint64_t s2moe_experts_shrink(s2moe_experts * experts, uint64_t capacity_bytes) {
    uint64_t n_bytes = 0;
    guard(S2MOE_ERROR_INTERNAL, [&] { n_bytes = experts->cache.shrink(capacity_bytes); });
    return n_bytes;
}

uint64_t s2moe_experts_grow(s2moe_experts * experts, uint64_t capacity_bytes) {
    uint64_t n_bytes = 0;
    guard(S2MOE_ERROR_INTERNAL, [&] { n_bytes = experts->cache.grow(capacity_bytes); });
    return n_bytes;
}

int32_t s2moe_experts_reader(const s2moe_experts * experts, char ** reader_json) {
    return guard(S2MOE_ERROR_INTERNAL, [&] { *reader_json = s2moe::copy_string(experts->cache.reader_json()); });
}

int32_t
s2moe_experts_use_device(s2moe_experts * experts, llama_context * ctx, const char * device, uint64_t capacity_bytes) {
    return guard(S2MOE_ERROR_INTERNAL, [&] {
        if (experts->device != nullptr) {
            throw failure(S2MOE_ERROR_INVALID, "the experts have a device already");
        }
        if (s2moe::experts_of(ctx) != &experts->cache) {
            throw failure(S2MOE_ERROR_INVALID, "the context's model does not take its experts from this store");
        }
        auto tier = std::make_unique<s2moe::device_tier>(
            experts->cache, create_device(device == nullptr ? "" : device, ctx), capacity_bytes);
        tier->attach(ctx);
        experts->device = std::move(tier);
    });
}

uint64_t s2moe_experts_device_floor_bytes(const s2moe_experts * experts) {
    return s2moe::slot_floor_bytes(experts->cache.layout);
}

int32_t s2moe_experts_device(const s2moe_experts * experts, char ** device_json) {
    return guard(S2MOE_ERROR_INTERNAL, [&] {
        if (experts->device == nullptr) {
            throw failure(S2MOE_ERROR_INVALID, "the experts have no device");
        }
        *device_json = s2moe::copy_string(experts->device->to_json());
    });
}

void s2moe_experts_device_stats(const s2moe_experts * experts, s2moe_device_stats * stats) {
    experts->cache.device_stats(*stats);
}

void s2moe_experts_stats(const s2moe_experts * experts, s2moe_expert_stats * stats) {
    experts->cache.stats(*stats);
}

int32_t s2moe_experts_residency(const s2moe_experts * experts, int32_t layer, uint8_t * mask, int32_t n_expert) {
    return guard(S2MOE_ERROR_INTERNAL, [&] {
        const int index = checked_layer(experts, layer, n_expert);
        experts->cache.residency(index, {mask, static_cast<size_t>(n_expert)});
    });
}

int32_t s2moe_experts_prefetch(
    s2moe_experts * experts, const s2moe_expert_id * ids, int32_t n_ids, s2moe_priority priority, int32_t * n_queued) {
    return guard(S2MOE_ERROR_INTERNAL, [&] {
        check_count("n_ids", n_ids);
        if (priority != S2MOE_PRIORITY_PREFETCH && priority != S2MOE_PRIORITY_WARMUP) {
            throw failure(S2MOE_ERROR_INVALID, "priority is " + std::to_string(priority) + ", which is unknown");
        }
        const int n = experts->cache.prefetch({ids, static_cast<size_t>(n_ids)}, priority);
        if (n_queued != nullptr) {
            *n_queued = n;
        }
    });
}

int32_t s2moe_experts_cancel_prefetches(s2moe_experts * experts) {
    int32_t n = 0;
    guard(S2MOE_ERROR_INTERNAL, [&] { n = experts->cache.cancel_prefetches(); });
    return n;
}

int32_t s2moe_experts_pin(s2moe_experts * experts, const s2moe_expert_id * ids, int32_t n_ids) {
    return guard(S2MOE_ERROR_INTERNAL, [&] {
        check_count("n_ids", n_ids);
        experts->cache.pin({ids, static_cast<size_t>(n_ids)});
    });
}

void s2moe_experts_costs(const s2moe_experts * experts, s2moe_expert_costs * costs) {
    *costs = experts->cache.costs();
}

int32_t s2moe_experts_counts(const s2moe_experts * experts, uint64_t * counts, int64_t n) {
    return guard(S2MOE_ERROR_INTERNAL, [&] {
        check_counts(experts, n);
        experts->cache.counts({counts, static_cast<size_t>(n)});
    });
}

int32_t s2moe_experts_warm(s2moe_experts * experts, const uint64_t * counts, int64_t n) {
    return guard(S2MOE_ERROR_INTERNAL, [&] {
        check_counts(experts, n);
        experts->cache.warm({counts, static_cast<size_t>(n)});
    });
}

int32_t s2moe_experts_set_trace(s2moe_experts * experts, int64_t n_max) {
    return guard(S2MOE_ERROR_INTERNAL, [&] {
        check_count("n_max", n_max);
        experts->cache.set_trace(n_max);
    });
}

int64_t s2moe_experts_take_trace(s2moe_experts * experts, s2moe_expert_trace * records, int64_t n_max) {
    int64_t n = 0;
    guard(S2MOE_ERROR_INTERNAL, [&] {
        check_count("n_max", n_max);
        n = experts->cache.take_trace({records, static_cast<size_t>(n_max)});
    });
    return n;
}

int32_t s2moe_experts_measure(s2moe_experts * experts, uint64_t n_bytes, double * bytes_per_second) {
    return guard(S2MOE_ERROR_INTERNAL, [&] { *bytes_per_second = experts->cache.measure(n_bytes); });
}

int32_t s2moe_context_memory(const llama_context * ctx, s2moe_memory * memory) {
    return guard(S2MOE_ERROR_INTERNAL, [&] {
        *memory = {};
        for (const auto & [buffer_type, each] : llama_get_memory_breakdown(ctx)) {
            ggml_backend_dev_t device = ggml_backend_buft_get_device(buffer_type);
            if (device != nullptr && is_gpu(device)) {
                memory->gpu_weights_bytes += each.model;
                memory->gpu_kv_bytes += each.context;
                memory->gpu_compute_bytes += each.compute;
                continue;
            }
            if (!s2moe::is_expert_buffer_type(buffer_type)) {
                memory->weights_bytes += each.model;
            }
            memory->kv_bytes += each.context;
            memory->compute_bytes += each.compute;
        }
    });
}

int32_t s2moe_gpu_memory(int32_t index, uint64_t * free_bytes, uint64_t * total_bytes) {
    return guard(S2MOE_ERROR_INTERNAL, [&] {
        std::vector<ggml_backend_dev_t> gpus; // integrated ones only where there is no other
        for (const auto type : {GGML_BACKEND_DEVICE_TYPE_GPU, GGML_BACKEND_DEVICE_TYPE_IGPU}) {
            for (size_t i = 0; i < ggml_backend_dev_count() && (gpus.empty() || type == GGML_BACKEND_DEVICE_TYPE_GPU);
                 ++i) {
                if (ggml_backend_dev_type(ggml_backend_dev_get(i)) == type) {
                    gpus.push_back(ggml_backend_dev_get(i));
                }
            }
        }
        if (index < 0 || index >= static_cast<int32_t>(gpus.size())) {
            throw failure(S2MOE_ERROR_UNSUPPORTED, "llama.cpp has no GPU " + std::to_string(index));
        }
        size_t n_free = 0;
        size_t n_total = 0;
        ggml_backend_dev_memory(gpus[index], &n_free, &n_total);
        *free_bytes = n_free;
        *total_bytes = n_total;
    });
}

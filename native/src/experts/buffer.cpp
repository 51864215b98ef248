// The buffer type of expert tensors: address space without memory behind it.

#include <sys/mman.h>

#include <memory>
#include <mutex>
#include <vector>

#include "barrier.h"
#include "ggml-cpu.h"
#include "matmul.h"

namespace s2moe {

namespace {

class expert_buffer_type final : public ggml::cpu::extra_buffer_type {
  public:
    bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) override;
    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override;

    expert_cache * cache = nullptr;
    ggml_backend_buffer_type buffer_type = {};
};

const char * get_name(ggml_backend_buffer_type_t) {
    return "S2MOE_EXPERTS"; // llama_moe_is_stored() knows it
}

} // namespace

bool is_expert_buffer_type(ggml_backend_buffer_type_t buffer_type) {
    return buffer_type->iface.get_name == get_name;
}

namespace {

struct expert_buffer {
    expert_cache * cache = nullptr;
    void * base = nullptr;
    size_t n_bytes = 0;
    std::vector<std::unique_ptr<expert_matrix>> matrices;
};

constexpr size_t tensor_alignment = 64;

size_t get_alignment(ggml_backend_buffer_type_t) {
    return tensor_alignment;
}

bool is_ours(const ggml_tensor * tensor) {
    return tensor != nullptr && tensor->buffer != nullptr && is_expert_buffer_type(tensor->buffer->buft);
}

void free_buffer(ggml_backend_buffer_t buffer) {
    auto * context = static_cast<expert_buffer *>(buffer->context);
    munmap(context->base, context->n_bytes);
    delete context;
}

void * get_base(ggml_backend_buffer_t buffer) {
    return static_cast<expert_buffer *>(buffer->context)->base;
}

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    auto * context = static_cast<expert_buffer *>(buffer->context);
    tensor->extra = nullptr;
    for (size_t i = 0; i < context->cache->layout.layers.size(); ++i) {
        const auto & parts = context->cache->layout.layers[i].parts;
        for (size_t part = 0; part < parts.size(); ++part) {
            if (parts[part].tensor == tensor->name) {
                context->matrices.push_back(std::make_unique<expert_matrix>(
                    *context->cache, static_cast<int>(i), static_cast<int>(part), tensor));
                tensor->extra = context->matrices.back().get();
                context->cache->note_tensor(static_cast<int>(i), static_cast<int>(part), tensor);
            }
        }
    }
    return tensor->extra == nullptr ? GGML_STATUS_FAILED : GGML_STATUS_SUCCESS;
}

// Nothing is stored: the cache reads what it needs from the file.
void set_tensor(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {
}

void clear(ggml_backend_buffer_t, uint8_t) {
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buffer_type, size_t size) {
    auto * type = static_cast<expert_buffer_type *>(static_cast<ggml::cpu::extra_buffer_type *>(buffer_type->context));
    void * base =
        size == 0 ? nullptr : mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return nullptr;
    }
    static constexpr ggml_backend_buffer_i functions = {
        .free_buffer = free_buffer,
        .get_base = get_base,
        .init_tensor = init_tensor,
        .memset_tensor = nullptr,
        .set_tensor = set_tensor,
        .get_tensor = nullptr,
        .set_tensor_2d = nullptr,
        .get_tensor_2d = nullptr,
        .cpy_tensor = nullptr,
        .clear = clear,
        .reset = nullptr,
    };
    return ggml_backend_buffer_init(buffer_type, functions, new expert_buffer{type->cache, base, size, {}}, size);
}

bool expert_buffer_type::supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return op->op == GGML_OP_MUL_MAT_ID && is_ours(op->src[0]) && op->src[0]->view_src == nullptr &&
           op->src[1]->type == GGML_TYPE_F32;
}

ggml::cpu::tensor_traits * expert_buffer_type::get_tensor_traits(const ggml_tensor * op) {
    acquire_from_others();
    const bool mine = op->op == GGML_OP_MUL_MAT_ID && is_ours(op->src[0]) && op->src[0]->buffer->buft == &buffer_type;
    return mine ? static_cast<ggml::cpu::tensor_traits *>(op->src[0]->extra) : nullptr;
}

std::mutex types_mutex;
std::vector<std::unique_ptr<expert_buffer_type>> types;

// llama.cpp offers every extra type to every weight, from a list that ggml-cpu copies when it is first asked: having it
// asked before our types are there keeps other models' weights out of them.
void fix_offered_types(ggml_backend_dev_t device) {
    auto * function = ggml_backend_reg_get_proc_address(ggml_backend_cpu_reg(), "ggml_backend_dev_get_extra_bufts");
    reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(function)(device);
}

} // namespace

ggml_backend_buffer_type_t acquire_expert_buffer_type(expert_cache * cache) {
    const std::lock_guard lock(types_mutex);
    for (const auto & type : types) {
        if (type->cache == nullptr) {
            type->cache = cache;
            return &type->buffer_type;
        }
    }
    auto & type = types.emplace_back(std::make_unique<expert_buffer_type>());
    type->cache = cache;
    type->buffer_type.iface.get_name = get_name;
    type->buffer_type.iface.alloc_buffer = alloc_buffer;
    type->buffer_type.iface.get_alignment = get_alignment;
    type->buffer_type.device = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
    fix_offered_types(type->buffer_type.device);
    type->buffer_type.context = static_cast<ggml::cpu::extra_buffer_type *>(type.get());
    ggml_backend_cpu_get_extra_buffer_types().push_back(&type->buffer_type);
    return &type->buffer_type;
}

void release_expert_buffer_type(ggml_backend_buffer_type_t buffer_type) {
    const std::lock_guard lock(types_mutex);
    for (const auto & type : types) {
        if (&type->buffer_type == buffer_type) {
            type->cache = nullptr;
        }
    }
}

expert_cache * cache_of(const ggml_tensor * tensor) {
    if (!is_ours(tensor) || tensor->buffer->context == nullptr) {
        return nullptr;
    }
    return static_cast<expert_buffer *>(tensor->buffer->context)->cache;
}

} // namespace s2moe

// The multiplication of activations with experts in slots: ggml's mul_mat_id for our buffer type.

#pragma once

#include <memory>

#include "cache.h"
#include "ggml-backend-impl.h"
#include "s2moe-repack.h"
#include "traits.h"

namespace s2moe {

// One stacked expert tensor of the model. It has an address but no memory: its matrices are in the cache's slots.
class expert_matrix final : public ggml::cpu::tensor_traits {
  public:
    expert_matrix(expert_cache & cache, int layer_index, int part, const ggml_tensor * tensor);

    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override;
    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override;

  private:
    struct work;
    struct row;

    work lay_out(const ggml_tensor * op, void * base) const;
    void group_rows(const ggml_tensor * op, const work & work) const;
    void quantize_rows(const ggml_compute_params * params, const ggml_tensor * op, const work & work) const;
    void quantize_tiles(const ggml_compute_params * params, const ggml_tensor * op, const work & work) const;
    const std::byte * activation(const ggml_tensor * op, const work & work, const row & row) const;
    void multiply(const ggml_compute_params * params, ggml_tensor * op, const work & work) const;
    void
    multiply_chunk(ggml_tensor * op, const work & work, const op_expert & expert, int64_t begin, int64_t end) const;
    void multiply_rows(ggml_tensor * op, const work & work, const op_expert & expert, int64_t begin, int64_t end) const;
    void
    multiply_tiles(ggml_tensor * op, const work & work, const op_expert & expert, int64_t begin, int64_t end) const;
    void
    multiply_vectors(ggml_tensor * op, const work & work, const op_expert & expert, int64_t begin, int64_t end) const;
    void zero(ggml_tensor * op, const work & work, const op_expert & expert, int64_t begin, int64_t end) const;
    void pack(std::byte * data, int64_t begin, int64_t end) const;

    expert_cache & cache;
    const int layer_index;
    const int part;
    const ggml_type type;
    const int64_t n_values; // of a row
    const int64_t n_rows;   // of a matrix
    const int64_t n_expert;
    const size_t row_bytes;
    bool packed;                  // the kernels of a repacked layout are used
    bool q4;                      // with our own kernel
    s2moe_repack_kernels kernels; // if packed
    ggml_type activation_type;
    size_t activation_bytes; // of one row of activations
};

// A buffer type for the expert tensors of one cache. It lives for ever, since ggml keeps a list of such types; `cache`
// is what its buffers belong to, nullptr while it waits to be used again.
ggml_backend_buffer_type_t acquire_expert_buffer_type(expert_cache * cache);
void release_expert_buffer_type(ggml_backend_buffer_type_t buffer_type);
bool is_expert_buffer_type(ggml_backend_buffer_type_t buffer_type);

// The cache that a model's expert tensor lives in, nullptr for another tensor.
expert_cache * cache_of(const ggml_tensor * tensor);

} // namespace s2moe

#include "matmul.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "barrier.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "q4_kernel.h"

namespace s2moe {

namespace {

constexpr int64_t gemv_tokens_max = 8; // batches up to this width are multiplied row by row, bit-equal to single tokens
constexpr int64_t tile_rows = 4;       // rows of activations that the kernels multiply at once
constexpr int64_t gemm_rows_max = 64;  // rows of activations per call: with a chunk of weights they fit the cache
constexpr int64_t gemm_chunk_rows = 64;
constexpr int64_t block_rows = 32; // rows of weights that stay in the first cache while several vectors pass
constexpr int64_t pack_rows = 64;

// All threads of the graph meet.
void meet(const ggml_compute_params * params) {
    release_to_others();
    ggml_barrier(params->threadpool);
    acquire_from_others();
}

template <typename T> T * advance(std::byte *& cursor, size_t n) {
    constexpr size_t alignment = 64;
    cursor =
        reinterpret_cast<std::byte *>((reinterpret_cast<uintptr_t>(cursor) + alignment - 1) / alignment * alignment);
    T * result = reinterpret_cast<T *>(cursor);
    cursor += n * sizeof(T);
    return result;
}

const float * source_row(const ggml_tensor * op, int32_t used, int32_t token) {
    const ggml_tensor * src = op->src[1];
    const auto * base = static_cast<const char *>(src->data);
    return reinterpret_cast<const float *>(base + used % src->ne[1] * src->nb[1] + token * src->nb[2]);
}

float * result_row(ggml_tensor * op, int32_t used, int32_t token) {
    return reinterpret_cast<float *>(static_cast<char *>(op->data) + used * op->nb[1] + token * op->nb[2]);
}

} // namespace

// One row of activations of one expert: the `used`-th expert of the token.
struct expert_matrix::row {
    int32_t used;
    int32_t token;
};

// What the threads share during an op, in ggml's work buffer.
struct expert_matrix::work {
    bool tiled;
    int64_t n_ids; // experts per token
    int64_t n_tokens;
    int32_t * row_counts;    // [n_expert]
    int32_t * row_begins;    // [n_expert], index in `rows`
    row * rows;              // [n_ids * n_tokens], those of an expert side by side
    std::byte * activations; // not tiled: [n_tokens][ne11]; tiled: as `rows`, quantised by fours where there are four
    size_t n_bytes;
};

expert_matrix::expert_matrix(expert_cache & cache, int layer_index, int part, const ggml_tensor * tensor)
    : cache(cache), layer_index(layer_index), part(part), type(tensor->type), n_values(tensor->ne[0]),
      n_rows(tensor->ne[1]), n_expert(tensor->ne[2]), row_bytes(ggml_row_size(tensor->type, tensor->ne[0])),
      packed(false), q4(false), kernels() {
    release_to_others(); // to the threads that will compute
    packed = s2moe_find_repack_kernels(tensor, &kernels);
    activation_type = packed ? kernels.activation_type : ggml_get_type_traits_cpu(type)->vec_dot_type;
    q4 = packed && type == GGML_TYPE_Q4_0 && kernels.n_interleaved == 8 && activation_type == GGML_TYPE_Q8_0 &&
         q4_kernel_available();
    activation_bytes =
        q4 ? n_values / ggml_blck_size(type) * sizeof(q8_block) : ggml_row_size(activation_type, n_values);
}

expert_matrix::work expert_matrix::lay_out(const ggml_tensor * op, void * base) const {
    work result = {};
    result.n_ids = op->src[2]->ne[0];
    result.n_tokens = op->src[2]->ne[1];
    result.tiled = packed && !q4 && result.n_tokens > gemv_tokens_max;
    const int64_t n_uses = result.n_ids * result.n_tokens;
    auto * cursor = static_cast<std::byte *>(base);
    result.row_counts = advance<int32_t>(cursor, n_expert);
    result.row_begins = advance<int32_t>(cursor, n_expert);
    result.rows = advance<row>(cursor, n_uses);
    const int64_t n_activations = result.tiled ? n_uses : ggml_nrows(op->src[1]);
    result.activations = advance<std::byte>(cursor, n_activations * activation_bytes);
    result.n_bytes = static_cast<size_t>(cursor - static_cast<std::byte *>(base));
    return result;
}

bool expert_matrix::work_size(int, const ggml_tensor * op, size_t & size) {
    size = lay_out(op, nullptr).n_bytes + 64;
    return true;
}

// Thread 0: which rows each expert multiplies, and the news to the cache.
void expert_matrix::group_rows(const ggml_tensor * op, const work & work) const {
    const ggml_tensor * ids = op->src[2];
    const auto id_of = [&](int64_t used, int64_t token) {
        const auto * base = static_cast<const char *>(ids->data);
        return *reinterpret_cast<const int32_t *>(base + token * ids->nb[1] + used * ids->nb[0]);
    };
    std::fill_n(work.row_counts, n_expert, 0);
    for (int64_t token = 0; token < work.n_tokens; ++token) {
        for (int64_t used = 0; used < work.n_ids; ++used) {
            const int32_t id = id_of(used, token);
            if (id < 0 || id >= n_expert) {
                cache.fail(S2MOE_ERROR_NUMERIC,
                           "the router of layer " + std::to_string(cache.layout.layers[layer_index].layer) +
                               " chose an expert that does not exist; the model's weights are damaged");
                float * lost =
                    result_row(const_cast<ggml_tensor *>(op), static_cast<int32_t>(used), static_cast<int32_t>(token));
                std::fill_n(lost, n_rows, 0.0F);
                continue;
            }
            ++work.row_counts[id];
        }
    }
    int32_t n = 0;
    for (int64_t e = 0; e < n_expert; ++e) {
        work.row_begins[e] = n;
        n += work.row_counts[e];
        work.row_counts[e] = 0;
    }
    for (int64_t token = 0; token < work.n_tokens; ++token) {
        for (int64_t used = 0; used < work.n_ids; ++used) {
            const int32_t id = id_of(used, token);
            if (id >= 0 && id < n_expert) {
                work.rows[work.row_begins[id] + work.row_counts[id]++] = {static_cast<int32_t>(used),
                                                                          static_cast<int32_t>(token)};
            }
        }
    }
    cache.begin_op(layer_index,
                   part,
                   std::span<const int32_t>(work.row_counts, static_cast<size_t>(n_expert)),
                   static_cast<int>(work.n_tokens));
}

void expert_matrix::quantize_rows(const ggml_compute_params * params, const ggml_tensor * op, const work & work) const {
    const ggml_tensor * src = op->src[1];
    const auto from_float = ggml_get_type_traits_cpu(activation_type)->from_float;
    const int64_t n = ggml_nrows(src);
    for (int64_t i = params->ith; i < n; i += params->nth) {
        const float * values =
            source_row(op, static_cast<int32_t>(i % src->ne[1]), static_cast<int32_t>(i / src->ne[1]));
        std::byte * to = work.activations + i * activation_bytes;
        if (q4) {
            thread_local std::vector<std::byte> row;
            row.resize(ggml_row_size(activation_type, n_values));
            from_float(values, row.data(), n_values);
            expand_q8(row.data(), reinterpret_cast<q8_block *>(to), n_values / ggml_blck_size(type));
        } else if (activation_type == GGML_TYPE_F32) {
            std::memcpy(to, values, n_values * sizeof(float));
        } else {
            from_float(values, to, n_values);
        }
    }
}

// Every expert's rows by fours; what is left of them one by one.
void expert_matrix::quantize_tiles(const ggml_compute_params * params,
                                   const ggml_tensor * op,
                                   const work & work) const {
    const auto from_float = ggml_get_type_traits_cpu(activation_type)->from_float;
    std::vector<float> four(tile_rows * n_values);
    int64_t n_seen = 0; // tiles and single rows, dealt out in turn
    for (int64_t e = 0; e < n_expert; ++e) {
        const int32_t n = work.row_counts[e];
        for (int32_t i = 0; i < n; ++n_seen) {
            const bool full = n - i >= tile_rows;
            const int32_t step = full ? tile_rows : 1;
            if (n_seen % params->nth == params->ith) {
                const row * rows = work.rows + work.row_begins[e] + i;
                std::byte * to = work.activations + (work.row_begins[e] + i) * activation_bytes;
                if (full) {
                    for (int64_t r = 0; r < tile_rows; ++r) {
                        std::memcpy(
                            &four[r * n_values], source_row(op, rows[r].used, rows[r].token), n_values * sizeof(float));
                    }
                    kernels.quantize_4(four.data(), to, tile_rows, n_values);
                } else {
                    from_float(source_row(op, rows->used, rows->token), to, n_values);
                }
            }
            i += step;
        }
    }
}

// Brings rows [begin, end) of a matrix into the kernels' layout, in place.
void expert_matrix::pack(std::byte * data, int64_t begin, int64_t end) const {
    thread_local std::vector<std::byte> copy;
    copy.resize(pack_rows * row_bytes);
    for (int64_t i = begin; i < end; i += pack_rows) {
        const int64_t n = std::min(pack_rows, end - i);
        std::byte * rows = data + i * row_bytes;
        std::memcpy(copy.data(), rows, n * row_bytes);
        ggml_tensor target = {};
        target.type = type;
        target.ne[0] = n_values;
        target.ne[1] = n;
        target.ne[2] = target.ne[3] = 1;
        target.nb[0] = ggml_type_size(type);
        target.nb[1] = row_bytes;
        target.nb[2] = target.nb[3] = n * row_bytes;
        target.data = rows;
        kernels.repack(&target, copy.data(), n * row_bytes);
    }
}

void expert_matrix::zero(
    ggml_tensor * op, const work & work, const op_expert & expert, int64_t begin, int64_t end) const {
    const row * rows = work.rows + work.row_begins[expert.expert];
    for (int r = 0; r < expert.n_rows; ++r) {
        std::fill(result_row(op, rows[r].used, rows[r].token) + begin,
                  result_row(op, rows[r].used, rows[r].token) + end,
                  0.0F);
    }
}

// The quantised vector of a row, as quantize_rows() laid them out.
const std::byte * expert_matrix::activation(const ggml_tensor * op, const work & work, const row & row) const {
    const int64_t ne11 = op->src[1]->ne[1];
    return work.activations + (row.used % ne11 + row.token * ne11) * activation_bytes;
}

void expert_matrix::multiply_rows(
    ggml_tensor * op, const work & work, const op_expert & expert, int64_t begin, int64_t end) const {
    const auto vec_dot = ggml_get_type_traits_cpu(type)->vec_dot;
    const row * rows = work.rows + work.row_begins[expert.expert];
    // several vectors: block by block of weights, so that each is fetched from memory once
    const int64_t step = expert.n_rows > 1 ? block_rows : end - begin;
    for (int64_t i = begin; i < end; i += step) {
        const int64_t stop = std::min(i + step, end);
        const std::byte * weights = expert.data + i * row_bytes;
        for (int r = 0; r < expert.n_rows; ++r) {
            const std::byte * vector = activation(op, work, rows[r]);
            float * result = result_row(op, rows[r].used, rows[r].token) + i;
            if (packed) {
                kernels.gemv(
                    static_cast<int>(n_values), result, n_rows, weights, vector, 1, static_cast<int>(stop - i));
                continue;
            }
            for (int64_t j = 0; j < stop - i; ++j) {
                vec_dot(static_cast<int>(n_values), result + j, 0, weights + j * row_bytes, 0, vector, 0, 1);
            }
        }
    }
}

void expert_matrix::multiply_vectors(
    ggml_tensor * op, const work & work, const op_expert & expert, int64_t begin, int64_t end) const {
    thread_local std::vector<const q8_block *> vectors;
    thread_local std::vector<float *> results;
    vectors.clear();
    results.clear();
    const row * rows = work.rows + work.row_begins[expert.expert];
    for (int r = 0; r < expert.n_rows; ++r) {
        vectors.push_back(reinterpret_cast<const q8_block *>(activation(op, work, rows[r])));
        results.push_back(result_row(op, rows[r].used, rows[r].token) + begin);
    }
    multiply_q4(expert.data + begin * row_bytes,
                end - begin,
                n_values / ggml_blck_size(type),
                vectors.data(),
                results.data(),
                expert.n_rows);
}

void expert_matrix::multiply_tiles(
    ggml_tensor * op, const work & work, const op_expert & expert, int64_t begin, int64_t end) const {
    const int n_columns = static_cast<int>(end - begin);
    const std::byte * weights = expert.data + begin * row_bytes;
    const int32_t first = work.row_begins[expert.expert];
    const row * rows = work.rows + first;
    float results[gemm_rows_max * gemm_chunk_rows];
    int done = 0;
    while (expert.n_rows - done >= tile_rows) {
        const int n = std::min<int>((expert.n_rows - done) / tile_rows * tile_rows, gemm_rows_max);
        kernels.gemm(static_cast<int>(n_values),
                     results,
                     n_columns,
                     weights,
                     work.activations + (first + done) * activation_bytes,
                     n,
                     n_columns);
        for (int r = 0; r < n; ++r) {
            std::copy_n(
                results + r * n_columns, n_columns, result_row(op, rows[done + r].used, rows[done + r].token) + begin);
        }
        done += n;
    }
    for (; done < expert.n_rows; ++done) {
        kernels.gemv(static_cast<int>(n_values),
                     result_row(op, rows[done].used, rows[done].token) + begin,
                     n_rows,
                     weights,
                     work.activations + (first + done) * activation_bytes,
                     1,
                     n_columns);
    }
}

void expert_matrix::multiply_chunk(
    ggml_tensor * op, const work & work, const op_expert & expert, int64_t begin, int64_t end) const {
    if (expert.data == nullptr) {
        zero(op, work, expert, begin, end);
        return;
    }
    if (expert.raw && packed) {
        pack(expert.data, begin, end);
    }
    if (q4) {
        multiply_vectors(op, work, expert, begin, end);
    } else if (work.tiled) {
        multiply_tiles(op, work, expert, begin, end);
    } else {
        multiply_rows(op, work, expert, begin, end);
    }
}

void expert_matrix::multiply(const ggml_compute_params * params, ggml_tensor * op, const work & work) const {
    const int64_t unit = packed ? kernels.n_interleaved : 1;
    const int64_t wanted =
        work.n_tokens > gemv_tokens_max ? gemm_chunk_rows : (n_rows + 2 * params->nth - 1) / (2 * params->nth);
    const int64_t chunk = (wanted + unit - 1) / unit * unit;
    const int64_t n_chunks = (n_rows + chunk - 1) / chunk; // of an expert
    const int64_t n_total = n_chunks * cache.n_op_experts();
    for (int64_t i = cache.next_chunk(); i < n_total; i = cache.next_chunk()) {
        const op_expert & expert = cache.wait_expert(static_cast<int>(i / n_chunks));
        const int64_t begin = i % n_chunks * chunk;
        multiply_chunk(op, work, expert, begin, std::min(begin + chunk, n_rows));
    }
}

bool expert_matrix::compute_forward(ggml_compute_params * params, ggml_tensor * op) {
    if (op->op != GGML_OP_MUL_MAT_ID) {
        return false;
    }
    const work work = lay_out(op, params->wdata);
    GGML_ASSERT(work.n_bytes <= params->wsize);
    acquire_from_others();
    if (params->ith == 0) {
        cache.set_thread_count(params->nth);
        try {
            group_rows(op, work);
        } catch (const std::exception & error) { // must not reach ggml's C code
            cache.abandon_op(error.what());
            std::memset(op->data, 0, ggml_nbytes(op));
        }
    }
    if (work.tiled) {
        meet(params);
        quantize_tiles(params, op, work);
    } else {
        quantize_rows(params, op, work);
    }
    meet(params);
    multiply(params, op, work);
    if (params->ith == 0) {
        cache.end_op();
    }
    release_to_others();
    return true;
}

} // namespace s2moe

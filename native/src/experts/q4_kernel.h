// Q4_0 matrices in ggml's 8-row interleaved layout times any number of vectors, for CPUs with AVX-512 VNNI.
//
// ggml's row kernel unpacks the weights again for each vector, its tile kernel rounds differently. This one unpacks
// them once per eight vectors and rounds as the row kernel does, so that a token's result does not depend on its batch.

#pragma once

#include <cstddef>
#include <cstdint>

namespace s2moe {

// 32 quantised values of a vector.
struct q8_block {
    float scale;
    int32_t offset; // -8 * sum of values: weights are stored without sign
    int8_t values[32];
};

// Whether this machine can run the functions below. [any thread]
bool q4_kernel_available();

// Expands a row of ggml's Q8_0 (n_blocks blocks) to `to` [n_blocks].
void expand_q8(const void * q8_0, q8_block * to, int64_t n_blocks);

/*
 * results[v][r] = row r of the matrix times vector v, exactly as ggml's gemv for Q4_0 8x8 computes it.
 *
 *   weights    n_rows rows (a multiple of 8), repacked by ggml: groups of 8 rows, n_blocks blocks of 144 bytes each
 *   vectors    [n_vectors], each [n_blocks]
 *   results    [n_vectors], each [n_rows]
 */
void multiply_q4(const std::byte * weights,
                 int64_t n_rows,
                 int64_t n_blocks,
                 const q8_block * const * vectors,
                 float * const * results,
                 int64_t n_vectors);

} // namespace s2moe

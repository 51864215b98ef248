// The patch's doors into ggml-cpu: which kernels it would use for a matrix in a repacked layout, and whether small
// batches are computed row by row.
//
// In a repacked layout n_interleaved rows of the matrix lie interwoven in one group, groups one after the other, and
// the whole takes as many bytes as before.

#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml.h"

struct s2moe_repack_kernels {
    ggml_type activation_type; // that the vectors are quantised to
    int64_t n_interleaved;

    // s[0 .. nc) = nc rows at vx (a multiple of n_interleaved) times the vector vy of n quantised values
    void (*gemv)(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);
    // s[r * bs + c] for nr rows (a multiple of 4) of vy, which quantize_4 interleaved
    void (*gemm)(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);
    // vy = 4 rows of n_per_row floats at x, quantised and interleaved; nrow is 4
    void (*quantize_4)(const float * x, void * vy, int64_t nrow, int64_t n_per_row);
    // writes the rows of `data` to t->data in the new layout; t describes them (type, ne)
    int (*repack)(ggml_tensor * t, const void * data, size_t data_size);
};

// Fills *kernels and returns true when ggml-cpu has a repacked layout for matrices like t on this machine. Thread-safe.
bool s2moe_find_repack_kernels(const ggml_tensor * t, s2moe_repack_kernels * kernels);

// Batches of up to so many rows are computed as each row alone would be; 0: as ggml likes it best, which rounds
// differently from four rows on, and for a single row against a KV cache of 512 cells or more. Set it before the first
// graph is computed.
extern int32_t s2moe_invariant_rows;

// Rows of a batch of n_rows that may be multiplied by fours.
inline int64_t s2moe_tiled_rows(int64_t n_rows) {
    return n_rows <= s2moe_invariant_rows ? 0 : n_rows - n_rows % 4;
}

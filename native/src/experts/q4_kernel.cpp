#include "q4_kernel.h"

#include <algorithm>
#include <cstring>

#include "ggml.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace s2moe {

namespace {

constexpr int64_t block_values = 32;
constexpr int64_t group_rows = 8;
constexpr int64_t block_bytes = group_rows * (sizeof(ggml_fp16_t) + block_values / 2); // of 8 interleaved rows
constexpr int64_t vectors_max = 8;                                                     // per pass over the weights

} // namespace

void expand_q8(const void * q8_0, q8_block * to, int64_t n_blocks) {
    const auto * from = static_cast<const std::byte *>(q8_0);
    for (int64_t b = 0; b < n_blocks; ++b, from += sizeof(ggml_fp16_t) + block_values) {
        ggml_fp16_t scale = 0;
        std::memcpy(&scale, from, sizeof(scale));
        std::memcpy(to[b].values, from + sizeof(scale), block_values);
        to[b].scale = ggml_fp16_to_fp32(scale);
        int32_t sum = 0;
        for (const int8_t value : to[b].values) {
            sum += value;
        }
        to[b].offset = -8 * sum;
    }
}

#if defined(__x86_64__)

#define S2MOE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")))

bool q4_kernel_available() {
    static const bool available = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                                  __builtin_cpu_supports("avx512vnni");
    return available;
}

namespace {

// The 32 columns of 8 rows: for each row 8 bytes of columns 0-7 (low nibbles) and 16-23 (high nibbles), then all rows'
// columns 8-15 and 24-31.
struct unpacked {
    __m512i columns_0, columns_8, columns_16, columns_24;
};

S2MOE_AVX512 inline unpacked unpack(const std::byte * block) {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x88)); // ggml stores q - 8 in four bits
    const __m512i mask = _mm512_set1_epi8(0x0F);
    const std::byte * values = block + group_rows * sizeof(ggml_fp16_t);
    const __m512i first = _mm512_xor_si512(_mm512_loadu_si512(values), sign);
    const __m512i second = _mm512_xor_si512(_mm512_loadu_si512(values + 64), sign);
    return {_mm512_and_si512(first, mask),
            _mm512_and_si512(second, mask),
            _mm512_and_si512(_mm512_srli_epi16(first, 4), mask),
            _mm512_and_si512(_mm512_srli_epi16(second, 4), mask)};
}

// Sixteen partial sums: two neighbours belong to one row.
S2MOE_AVX512 inline __m512i dot(const unpacked & weights, const q8_block & vector) {
    const auto eight = [&](int i) S2MOE_AVX512 {
        int64_t values = 0;
        std::memcpy(&values, vector.values + i, sizeof(values));
        return _mm512_set1_epi64(values);
    };
    __m512i sum = _mm512_maskz_set1_epi32(0x5555, vector.offset);
    sum = _mm512_dpbusd_epi32(sum, weights.columns_0, eight(0));
    sum = _mm512_dpbusd_epi32(sum, weights.columns_8, eight(8));
    sum = _mm512_dpbusd_epi32(sum, weights.columns_16, eight(16));
    return _mm512_dpbusd_epi32(sum, weights.columns_24, eight(24));
}

// One group of 8 rows times one vector: reads memory in one straight line, which single tokens are bound by.
S2MOE_AVX512 void multiply_group(const std::byte * group, int64_t n_blocks, const q8_block * vector, float * results) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    __m256 sums = _mm256_setzero_ps();
    const auto add = [&](const std::byte * block, const q8_block & values, __m256i dots) S2MOE_AVX512 {
        const __m256 scales = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(block)));
        sums = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), _mm256_mul_ps(scales, _mm256_set1_ps(values.scale)), sums);
    };
    for (int64_t b = 0; b < n_blocks; b += 2) {
        const bool both = b + 1 < n_blocks;
        const std::byte * block = group + b * block_bytes;
        const __m512i pairs_0 = dot(unpack(block), vector[b]);
        const __m512i pairs_1 = both ? dot(unpack(block + block_bytes), vector[b + 1]) : _mm512_setzero_si512();
        const __m512i dots = _mm512_add_epi32(_mm512_permutex2var_epi32(pairs_0, even, pairs_1),
                                              _mm512_permutex2var_epi32(pairs_0, odd, pairs_1));
        add(block, vector[b], _mm512_castsi512_si256(dots));
        if (both) {
            add(block + block_bytes, vector[b + 1], _mm512_extracti64x4_epi64(dots, 1));
        }
    }
    _mm256_storeu_ps(results, sums);
}

// Two groups of 8 rows times N vectors.
template <int N>
S2MOE_AVX512 void multiply_groups(const std::byte * first,
                                  const std::byte * second,
                                  int64_t n_blocks,
                                  const q8_block * const * vectors,
                                  float * const * results,
                                  int64_t row,
                                  __mmask16 kept) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const int64_t ahead = 2 * n_blocks * block_bytes;
    __m512 sums[N];
    for (int v = 0; v < N; ++v) {
        sums[v] = _mm512_setzero_ps();
    }
    for (int64_t b = 0; b < n_blocks; ++b) {
        const std::byte * block_0 = first + b * block_bytes;
        const std::byte * block_1 = second + b * block_bytes;
        // the next 16 rows: these two streams are too short for the hardware to follow
        for (int64_t line = 0; line < block_bytes; line += 64) {
            _mm_prefetch(block_0 + ahead + line, _MM_HINT_T0);
            _mm_prefetch(block_1 + ahead + line, _MM_HINT_T0);
        }
        const __m256i halves =
            _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(block_0))),
                                    _mm_loadu_si128(reinterpret_cast<const __m128i *>(block_1)),
                                    1);
        const __m512 scales = _mm512_cvtph_ps(halves);
        const unpacked weights_0 = unpack(block_0);
        const unpacked weights_1 = unpack(block_1);
        for (int v = 0; v < N; ++v) {
            const q8_block & vector = vectors[v][b];
            const __m512i pairs_0 = dot(weights_0, vector);
            const __m512i pairs_1 = dot(weights_1, vector);
            const __m512i dots = _mm512_add_epi32(_mm512_permutex2var_epi32(pairs_0, even, pairs_1),
                                                  _mm512_permutex2var_epi32(pairs_0, odd, pairs_1));
            const __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(vector.scale));
            sums[v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, sums[v]);
        }
    }
    for (int v = 0; v < N; ++v) {
        _mm512_mask_storeu_ps(results[v] + row, kept, sums[v]);
    }
}

} // namespace

S2MOE_AVX512 void multiply_q4(const std::byte * weights,
                              int64_t n_rows,
                              int64_t n_blocks,
                              const q8_block * const * vectors,
                              float * const * results,
                              int64_t n_vectors) {
    using function = void (*)(
        const std::byte *, const std::byte *, int64_t, const q8_block * const *, float * const *, int64_t, __mmask16);
    static constexpr function functions[vectors_max] = {multiply_groups<1>,
                                                        multiply_groups<2>,
                                                        multiply_groups<3>,
                                                        multiply_groups<4>,
                                                        multiply_groups<5>,
                                                        multiply_groups<6>,
                                                        multiply_groups<7>,
                                                        multiply_groups<8>};
    const int64_t group_bytes = n_blocks * block_bytes;
    if (n_vectors == 1) {
        for (int64_t row = 0; row < n_rows; row += group_rows) {
            multiply_group(weights + row / group_rows * group_bytes, n_blocks, vectors[0], results[0] + row);
        }
        return;
    }
    for (int64_t row = 0; row < n_rows; row += 2 * group_rows) {
        const std::byte * first = weights + row / group_rows * group_bytes;
        const bool both = row + group_rows < n_rows;
        const std::byte * second = both ? first + group_bytes : first;
        const auto kept = static_cast<__mmask16>(both ? 0xFFFF : 0x00FF);
        for (int64_t v = 0; v < n_vectors; v += vectors_max) {
            const int64_t n = std::min(vectors_max, n_vectors - v);
            functions[n - 1](first, second, n_blocks, vectors + v, results + v, row, kept);
        }
    }
}

#else

bool q4_kernel_available() {
    return false;
}

void multiply_q4(const std::byte *, int64_t, int64_t, const q8_block * const *, float * const *, int64_t) {
    GGML_ABORT("the Q4 kernel needs AVX-512");
}

#endif

} // namespace s2moe

// The patch's door into ggml-cuda: operations of ours (GGML_OP_CUSTOM) that the GPU computes, the size of its buffers,
// and how often it is waited for.
//
// An operation is known by the function that computes it on the CPU. With none registered ggml-cuda supports no custom
// operation, as unpatched, and the scheduler leaves them to the CPU.

#pragma once

#include <stdint.h>

#include "ggml-backend.h"
#include "ggml.h"

struct CUstream_st; // cudaStream_t points to it

struct s2moe_cuda_op {
    // Whether the GPU can compute `op`, whose tensors may have no memory yet.
    bool (*supports)(const ggml_tensor * op, void * userdata);

    // Queues the work on `stream`, of the current device. It may be recorded into a CUDA graph and repeated, so it must
    // not wait, and what changes between decodes must lie in device memory.
    void (*run)(ggml_tensor * dst, CUstream_st * stream, void * userdata);
};

// From now on the GPU computes operations whose CPU function is on_host; an empty op takes that back. Thread-safe, but
// graphs that were divided among the backends before stay as they are.
GGML_BACKEND_API void s2moe_cuda_set_op(ggml_custom_op_t on_host, s2moe_cuda_op op);

// Times that ggml-cuda.cu has waited for a stream, of any device, in any thread, since the process began.
GGML_BACKEND_API uint64_t s2moe_cuda_n_synchronizations();

// What the patch calls.
size_t
s2moe_cuda_max_buffer_size(ggml_backend_buffer_type_t type); // larger ones fail on some releases of Jetson's Linux
bool s2moe_cuda_supports_op(const ggml_tensor * op);
bool s2moe_cuda_run_op(ggml_tensor * dst, CUstream_st * stream); // false: it is not registered
void s2moe_cuda_note_synchronization();

#if defined(GGML_BACKEND_BUILD) && defined(__CUDACC__) // in ggml-cuda.cu: a patched line for each would be many
#define cudaStreamSynchronize(stream) (s2moe_cuda_note_synchronization(), cudaStreamSynchronize(stream))
#endif

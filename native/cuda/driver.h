// What every user of the CUDA runtime here needs.

#pragma once

#include <string>

#include <cuda_runtime.h>

#include "error.h"

namespace s2moe {

// Throws failure that names `what`, unless status is success.
inline void check_cuda(cudaError_t status, const std::string & what) {
    if (status != cudaSuccess) {
        (void)cudaGetLastError(); // it would be reported again by the next call
        throw failure(status == cudaErrorMemoryAllocation ? S2MOE_ERROR_NO_MEMORY : S2MOE_ERROR_INTERNAL,
                      what + ": " + cudaGetErrorString(status));
    }
}

// Makes a device the current one while it lives.
class device_scope {
  public:
    explicit device_scope(int device) {
        check_cuda(cudaGetDevice(&before), "cudaGetDevice");
        check_cuda(cudaSetDevice(device), "cudaSetDevice");
    }
    ~device_scope() {
        (void)cudaSetDevice(before);
    }
    device_scope(const device_scope &) = delete;
    device_scope & operator=(const device_scope &) = delete;

  private:
    int before = 0;
};

} // namespace s2moe

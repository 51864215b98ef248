# What S2MOE_CUDA=ON adds: our kernels, our part of ggml-cuda, and `cuda-check`, which compiles both and links nothing.

target_sources(ggml-cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/ggml/s2moe-cuda-op.cpp)
target_include_directories(ggml-cuda PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}/ggml)
if(S2MOE_CUBLAS_DIR)
    target_include_directories(ggml-cuda SYSTEM PRIVATE ${S2MOE_CUBLAS_DIR}/include)
endif()

# NVIDIA's libraries need not lie where the system looks for libraries
set(S2MOE_CUDA_RPATH "")
if(NOT DEFINED SKBUILD)
    set(S2MOE_CUDA_RPATH ${CUDAToolkit_LIBRARY_DIR})
    if(S2MOE_CUBLAS_DIR)
        list(APPEND S2MOE_CUDA_RPATH ${S2MOE_CUBLAS_DIR}/lib)
    endif()
endif()
set_property(TARGET ggml-cuda APPEND PROPERTY INSTALL_RPATH ${S2MOE_CUDA_RPATH})

# Compiled into libs2moe. Products are not fused with sums, so that doubles are those of the CPU. No library is linked
# with it: `cuda-check` would have to build that first.
add_library(s2moe-cuda OBJECT cuda/gate.cu)
target_compile_features(s2moe-cuda PRIVATE cuda_std_17)
target_compile_options(s2moe-cuda PRIVATE -fmad=false -Werror=all-warnings -Xcompiler=-Wall,-Wextra,-fvisibility=hidden)
target_include_directories(s2moe-cuda PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}/cuda PRIVATE
    ${CMAKE_CURRENT_SOURCE_DIR}/include ${CMAKE_CURRENT_SOURCE_DIR}/llama ${CMAKE_CURRENT_SOURCE_DIR}/src)
target_include_directories(s2moe-cuda SYSTEM PRIVATE ${S2MOE_LLAMA_DIR}/include ${S2MOE_LLAMA_DIR}/ggml/include)

# What our patches touch of ggml-cuda, and what we add to it, as ggml-cuda compiles them.
add_library(cuda-check-ggml OBJECT EXCLUDE_FROM_ALL
    ${S2MOE_LLAMA_DIR}/ggml/src/ggml-cuda/ggml-cuda.cu ${CMAKE_CURRENT_SOURCE_DIR}/ggml/s2moe-cuda-op.cpp)
foreach(property COMPILE_DEFINITIONS COMPILE_OPTIONS COMPILE_FEATURES INCLUDE_DIRECTORIES)
    set_property(TARGET cuda-check-ggml PROPERTY ${property} $<TARGET_PROPERTY:ggml-cuda,${property}>)
endforeach()

add_custom_target(cuda-check)
add_dependencies(cuda-check s2moe-cuda cuda-check-ggml)

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

# Compiled into libs2moe; the gate's kernel apart, for its test. Products are not fused with sums, so that doubles are
# those of the CPU. No library is linked with them: `cuda-check` would have to build that first.
add_library(s2moe-cuda-gate OBJECT cuda/gate.cu)
add_library(s2moe-cuda OBJECT cuda/gate_op.cpp cuda/remap.cu)
foreach(target s2moe-cuda-gate s2moe-cuda) # CMake knows C++20 for CUDA from 3.26 on only, hence the flag
    target_compile_features(${target} PRIVATE cxx_std_20)
    target_compile_options(${target} PRIVATE
        $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 -fmad=false -Xcompiler=-Wall,-Wextra,-fvisibility=hidden>
        "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${S2MOE_CUDA_CHECK}>>:-Werror=all-warnings>" # of the releases we know
        "$<$<COMPILE_LANGUAGE:CXX>:${S2MOE_WARNINGS};-fvisibility=hidden>")
    target_include_directories(${target} PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}/cuda PRIVATE
        ${CMAKE_CURRENT_SOURCE_DIR}/include ${CMAKE_CURRENT_SOURCE_DIR}/llama ${CMAKE_CURRENT_SOURCE_DIR}/src
        ${CMAKE_CURRENT_SOURCE_DIR}/ggml ${CUDAToolkit_INCLUDE_DIRS})
    target_include_directories(${target} SYSTEM PRIVATE ${S2MOE_LLAMA_DIR}/include ${S2MOE_LLAMA_DIR}/ggml/include)
endforeach()

# What our patches touch of ggml-cuda, and what we add to it, as ggml-cuda compiles them.
add_library(cuda-check-ggml OBJECT EXCLUDE_FROM_ALL
    ${S2MOE_LLAMA_DIR}/ggml/src/ggml-cuda/ggml-cuda.cu ${CMAKE_CURRENT_SOURCE_DIR}/ggml/s2moe-cuda-op.cpp)
foreach(property COMPILE_DEFINITIONS COMPILE_OPTIONS COMPILE_FEATURES INCLUDE_DIRECTORIES)
    set_property(TARGET cuda-check-ggml PROPERTY ${property} $<TARGET_PROPERTY:ggml-cuda,${property}>)
endforeach()

# What there is only with CUDA in our other sources, and the tests that need a GPU.
add_library(cuda-check-s2moe OBJECT EXCLUDE_FROM_ALL
    src/info.cpp src/experts/api.cpp src/speculation/gate.cpp tests/cuda_gate_test.cpp tests/cuda_slots_test.cpp)
target_compile_features(cuda-check-s2moe PRIVATE cxx_std_20)
target_compile_options(cuda-check-s2moe PRIVATE ${S2MOE_WARNINGS})
target_compile_definitions(cuda-check-s2moe PRIVATE $<TARGET_PROPERTY:s2moe,COMPILE_DEFINITIONS>)
target_include_directories(cuda-check-s2moe PRIVATE $<TARGET_PROPERTY:s2moe,INCLUDE_DIRECTORIES>
    ${CMAKE_CURRENT_SOURCE_DIR}/llama ${CMAKE_CURRENT_SOURCE_DIR}/ggml)
target_include_directories(cuda-check-s2moe SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS} ${S2MOE_LLAMA_DIR}/src
    ${S2MOE_LLAMA_DIR}/include ${S2MOE_LLAMA_DIR}/common ${S2MOE_LLAMA_DIR}/vendor ${S2MOE_LLAMA_DIR}/ggml/include
    ${S2MOE_LLAMA_DIR}/ggml/src ${S2MOE_LLAMA_DIR}/ggml/src/ggml-cpu)

add_custom_target(cuda-check)
add_dependencies(cuda-check s2moe-cuda-gate s2moe-cuda cuda-check-ggml cuda-check-s2moe)

# Cross-compiles for 64-bit ARM with Debian's g++-aarch64-linux-gnu; CMake runs what it builds under qemu-user.
# S2MOE_ARM_ROOT: a folder with an ARM Debian's shared libraries, in which the programs find theirs.

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES S2MOE_ARM_ROOT)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L ${S2MOE_ARM_ROOT})

set(CMAKE_FIND_ROOT_PATH ${S2MOE_ARM_ROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)

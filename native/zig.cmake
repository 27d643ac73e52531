# Compiles for a glibc older than this machine's, and for other processors: zig's C++ compiler, of the package ziglang.
# Environment: ZIG, the program, and WHEEL_ARCH, x86_64 or aarch64.
#
#     make wheels
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR $ENV{WHEEL_ARCH})
set(CMAKE_CXX_COMPILER $ENV{ZIG} c++)
set(CMAKE_CXX_COMPILER_TARGET ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu.2.28)  # as torch's own wheels: manylinux_2_28

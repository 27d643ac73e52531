#!/bin/sh
# trim.sh VENV: removes what training does not use. Files only: what is left is as it was, or lost its symbols.
set -eu
cd "$1"/lib/python3*/site-packages

# Programs and libraries of torch's own tests.
find torch/bin -type f ! -name torch_shm_manager -delete
rm -rf torch/test torch/lib/libbackend_with_compiler.so torch/lib/libjitbackend_test.so \
  torch/lib/libtorchbind_test.so torch/lib/libshm_windows

# What compiles C++ against torch or numpy: there is no compiler in the image.
rm -rf torch/include torch/share/cmake numpy/_core/include
find . -name '*.a' -type f -delete

# The API of Kubernetes once more, for asyncio.
rm -rf kubernetes/aio

# Tests of other packages.
find . -type d -name tests -prune -exec rm -rf {} +

# Symbols that only a debugger reads. Libraries of other packages have none, or don't stand it.
for library in torch/lib/*.so torch/lib/*.so.*; do
  strip --strip-unneeded "$library"
done

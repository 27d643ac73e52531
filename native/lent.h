// Memory of ours that another framework holds: the framework reports here that it has released it.
//
// This may happen in any thread, and after Python has ended, so Python must not be called.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
// Sets *flag, a byte, to 1. The first two arguments are the memory; they are not used. This is the deallocator of
// TensorFlow's TF_NewTensor. A reader of 1 sees everything that was written to the memory before.
void elastic_let_go(void* data, size_t bytes, void* flag);
}

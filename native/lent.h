// Memory of ours that another framework holds: it says here that it has let go of it.
//
// The framework may do so in any thread, and after Python has ended, so that no Python can be called.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
// Sets *flag, a byte, to 1. The first two arguments are what was lent; they are not looked at. As TensorFlow's
// deallocator of TF_NewTensor has it. Whoever reads 1 sees what was written to the memory before.
void elastic_let_go(void* data, size_t bytes, void* flag);
}

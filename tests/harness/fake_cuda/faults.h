// What is to go wrong, and where: read from FAKE_FAULTS by the made-up CUDA runtime and NCCL alike. README.md has the list.
#pragma once

namespace fake {

// A setting of this process: an environment variable that holds a whole number.
long setting(const char* name, long otherwise);

// One line on stderr, when FAKE_CUDA_LOG is set. `shout` writes always.
void log(const char* format, ...) __attribute__((format(printf, 1, 2)));
void shout(const char* format, ...) __attribute__((format(printf, 1, 2)));

enum class Blow { none, error, hang };

// Called at each place where something may go wrong, with the device and, in NCCL, the rank in the communicator (-1 where
// there is none). Dying, freezing and slowness happen in here; what the caller has to do itself is returned. `code`: of an
// error of the device, where the fault names one.
Blow strike(const char* place, int device, int rank, unsigned long bytes = 0, int* code = nullptr);

[[noreturn]] void hang();  // whatever happens

}  // namespace fake

// The number that the Python side checks before it calls anything else: a library that an older checkout left behind
// may have other functions, or other structs. Change it here and in elastic/collectives/shared_memory/native_library.py together.
#include <cstdint>

extern "C" int32_t elastic_abi(void) { return 11; }

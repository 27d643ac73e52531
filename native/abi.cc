// ABI version, which Python checks before any other call: a library of an older checkout may have other functions or
// structs. Change it here and in elastic/collectives/shared_memory/native_library.py together.
#include <cstdint>

extern "C" int32_t elastic_abi(void) { return 11; }

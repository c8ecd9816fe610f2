// The driver's own functions, found through the runtime, for programs that use both interfaces.
#pragma once

#include "check.h"

#include <cuda.h>

// The address of a driver function, of the version that the header declares.
inline void *driver_function(const char *name) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    CHECK(cudaGetDriverEntryPointByVersion(name, &function, CUDA_VERSION, cudaEnableDefault, &result));
#else
    CHECK(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result));
#endif
    EXPECT(result == cudaDriverEntryPointSuccess);
    EXPECT(function != nullptr);
    return function;
}

#define DRIVER(name) static auto name##_ = reinterpret_cast<decltype(&name)>(driver_function(#name))

// Ends the program with status 1 when a driver call fails.
#define CHECK_DRIVER(call)                                                                                             \
    do {                                                                                                               \
        CUresult check_result = (call);                                                                                \
        if (check_result != CUDA_SUCCESS) {                                                                            \
            std::printf("FAILED line %d: %s: %d\n", __LINE__, #call, int(check_result));                               \
            std::fflush(stdout);                                                                                       \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)

// Prints what a driver call answers.
#define SHOW_DRIVER(call)                                                                                              \
    do {                                                                                                               \
        std::printf("%s -> %d\n", #call, int(call));                                                                   \
        std::fflush(stdout);                                                                                           \
    } while (0)

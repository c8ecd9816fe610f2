// The driver's own functions, for programs that use both interfaces: looked up by name in the
// driver library, like in a linked program, or through the runtime.
#pragma once

#include "check.h"

#include <cuda.h>
#include <dlfcn.h>

// Returns the function of a symbol, or null if the driver is too old for it.
inline void *driver_symbol_if(const char *symbol) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW);
    EXPECT(library != nullptr);
    return dlsym(library, symbol);
}

// Returns the function of a symbol, which may differ from the header's name, e.g. cuMemAlloc_v2.
inline void *driver_symbol(const char *symbol) {
    void *function = driver_symbol_if(symbol);
    if (!function) std::printf("no %s in libcuda.so.1\n", symbol);
    EXPECT(function != nullptr);
    return function;
}

// Looks a function up through the runtime, which returns the newest form that it knows: only for
// functions with one form.
inline void *driver_entry_point(const char *name) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    CHECK(cudaGetDriverEntryPointByVersion(name, &function, CUDART_VERSION, cudaEnableDefault, &result));
#else
    CHECK(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result));
#endif
    EXPECT(result == cudaDriverEntryPointSuccess);
    EXPECT(function != nullptr);
    return function;
}

#define DRIVER_TEXT(symbol) #symbol
#define DRIVER_SYMBOL(name) driver_symbol(DRIVER_TEXT(name))
#define DRIVER(name) static auto name##_ = reinterpret_cast<decltype(&name)>(DRIVER_SYMBOL(name))
#define DRIVER_BY_RUNTIME(name) static auto name##_ = reinterpret_cast<decltype(&name)>(driver_entry_point(#name))

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

// Prints the code of a driver call.
#define SHOW_DRIVER(call)                                                                                              \
    do {                                                                                                               \
        std::printf("%s -> %d\n", #call, int(call));                                                                   \
        std::fflush(stdout);                                                                                           \
    } while (0)

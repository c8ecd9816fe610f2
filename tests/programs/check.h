// Shared code of the test programs: error checks that print one clear line, and a reproducible
// source of numbers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

// Ends the program with status 1 when a runtime call fails.
#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        cudaError_t check_status = (call);                                                                             \
        if (check_status != cudaSuccess) {                                                                             \
            std::printf("FAILED line %d: %s: %s\n", __LINE__, #call, cudaGetErrorName(check_status));                  \
            std::fflush(stdout);                                                                                       \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)

// Ends the program with status 1 when a result is wrong.
#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::printf("FAILED line %d: %s\n", __LINE__, #condition);                                                 \
            std::fflush(stdout);                                                                                       \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)

// Prints the code of a call, for programs whose output is compared between machines.
#define SHOW(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t show_status = (call);                                                                              \
        std::printf("%s -> %s\n", #call, cudaGetErrorName(show_status));                                               \
        std::fflush(stdout);                                                                                           \
    } while (0)

// A linear congruential generator: the same numbers on every machine.
struct Numbers {
    uint32_t state;
    explicit Numbers(uint32_t seed) : state(seed * 2654435761u + 1u) {}
    uint32_t next() {
        state = state * 1664525u + 1013904223u;
        return state >> 8;
    }
};

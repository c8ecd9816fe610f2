// Bytes that differ at each place, for programs that copy.
#pragma once

#include <cstddef>

inline unsigned char pattern(size_t i, unsigned seed) { return (unsigned char)((i * 2654435761u + seed) >> 13 ^ i); }

inline void fill(unsigned char *bytes, size_t count, unsigned seed) {
    for (size_t i = 0; i < count; i++) bytes[i] = pattern(i, seed);
}

inline bool holds(const unsigned char *bytes, size_t count, unsigned seed) {
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != pattern(i, seed)) return false;
    return true;
}

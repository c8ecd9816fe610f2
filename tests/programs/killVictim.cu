// killVictim [MiB]: allocates device memory (default 1024 MiB), uses all of it, prints READY, and
// sleeps until it is killed.
#include "check.h"

#include <unistd.h>

int main(int argc, char **argv) {
    size_t bytes = size_t(argc > 1 ? std::atoi(argv[1]) : 1024) << 20;
    void *memory;
    CHECK(cudaMalloc(&memory, bytes));
    CHECK(cudaMemset(memory, 1, bytes));
    CHECK(cudaDeviceSynchronize());
    std::printf("READY\n");
    std::fflush(stdout);
    for (;;) pause();
}

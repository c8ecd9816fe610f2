// Prints the free device memory in MiB.
#include "check.h"

int main() {
    size_t free = 0, total = 0;
    CHECK(cudaMemGetInfo(&free, &total));
    std::printf("%zu\n", free >> 20);
    return 0;
}

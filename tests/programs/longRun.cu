// longRun [SECONDS]: counts on the device for this time (default 1 s), with a checked step every 20
// ms. Tests disturb the site meanwhile.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include "check.h"

__global__ void step(unsigned *counter) { *counter += 1; }

int main(int argc, char **argv) {
    double seconds = argc > 1 ? std::atof(argv[1]) : 1;
    unsigned *counter, seen = 0, steps = 0;
    CHECK(cudaMalloc(&counter, sizeof *counter));
    CHECK(cudaMemset(counter, 0, sizeof *counter));
    while (steps < seconds * 50) {
        step<<<1, 1>>>(counter);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(&seen, counter, sizeof seen, cudaMemcpyDeviceToHost));
        EXPECT(seen == ++steps);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    CHECK(cudaFree(counter));
    std::printf("longRun: %u steps right\n", steps);
    return 0;
}

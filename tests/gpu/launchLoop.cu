// Launches an empty kernel a hundred thousand times from a C loop, in five rounds; prints the
// median rate as a JSON line.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

__global__ void nothing(int *) {}

int main() {
    const int launches = 100000, rounds = 5;
    int *memory = nullptr;
    double rates[rounds];
    if (cudaMalloc(&memory, 64) != cudaSuccess) return 1;
    nothing<<<1, 1>>>(memory);
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;
    for (double &rate : rates) {
        auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < launches; i++) nothing<<<1, 1>>>(memory);
        if (cudaDeviceSynchronize() != cudaSuccess) return 1;
        rate = launches / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    std::sort(rates, rates + rounds);
    std::printf("{\"name\": \"launch_rate_c\", \"value\": %.1f, \"unit\": \"k/s\"}\n", rates[rounds / 2] / 1e3);
    return 0;
}

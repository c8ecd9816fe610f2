// Launches a kernel a hundred thousand times from a C loop, in five rounds; prints the median rate
// as a JSON line.
//
// The first kernel is empty. The second one takes the GPU longer than its launch, so that the
// driver's queue is full.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

__global__ void nothing(float *) {}

__global__ void work(float *values) {
    float *value = &values[blockIdx.x * blockDim.x + threadIdx.x];
    float sum = *value;
    for (int i = 0; i < 1000; i++) sum = sum * 1.0001f + 0.5f;
    *value = sum;
}

static bool measure(const char *name, void (*kernel)(float *), int blocks, int threads, float *memory) {
    const int launches = 100000, rounds = 5;
    double rates[rounds];
    kernel<<<blocks, threads>>>(memory);
    if (cudaDeviceSynchronize() != cudaSuccess) return false;
    for (double &rate : rates) {
        auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < launches; i++) kernel<<<blocks, threads>>>(memory);
        if (cudaDeviceSynchronize() != cudaSuccess) return false;
        rate = launches / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    std::sort(rates, rates + rounds);
    std::printf("{\"name\": \"%s\", \"value\": %.1f, \"unit\": \"k/s\"}\n", name, rates[rounds / 2] / 1e3);
    return true;
}

int main() {
    const int blocks = 256, threads = 256;
    float *memory = nullptr;
    if (cudaMalloc(&memory, blocks * threads * sizeof *memory) != cudaSuccess) return 1;
    if (cudaMemset(memory, 0, blocks * threads * sizeof *memory) != cudaSuccess) return 1;
    if (!measure("launch_rate_c", nothing, 1, 1, memory)) return 1;
    return measure("launch_rate_busy", work, blocks, threads, memory) ? 0 : 1;
}

// After a kernel has failed, a reset of the device gives the program a new context.
#include "check.h"
#include <cstdio>

__global__ void fail(int *nowhere) { *nowhere = 1; }
__global__ void add(int *to, int what) { *to += what; }

int main() {
    for (int round = 0; round < 2; round++) {
        int *value = nullptr, back = 0;
        const cudaError_t made = cudaMalloc(&value, sizeof(int));
        std::printf("allocate: %s\n", cudaGetErrorName(made));
        if (made != cudaSuccess) break;
        std::printf("fill: %s\n", cudaGetErrorName(cudaMemset(value, 0, sizeof(int))));
        add<<<1, 1>>>(value, 5 + round);
        std::printf("copy: %s\n", cudaGetErrorName(cudaMemcpy(&back, value, sizeof back, cudaMemcpyDeviceToHost)));
        std::printf("value: %d\n", back);
        fail<<<1, 1>>>(nullptr);
        std::printf("synchronize: %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
        std::printf("free: %s\n", cudaGetErrorName(cudaFree(value)));
        std::printf("reset: %s\n", cudaGetErrorName(cudaDeviceReset()));
        std::printf("last error: %s\n", cudaGetErrorName(cudaGetLastError()));
        std::printf("synchronize after it: %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
    }
    std::printf("reset at the end: %s\n", cudaGetErrorName(cudaDeviceReset()));
    return 0;
}

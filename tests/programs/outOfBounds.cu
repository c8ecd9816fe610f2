// A kernel that writes far outside all allocations: the error at the launch, at the
// synchronization, and at later calls, which must all keep failing. Exits with status 0 if each
// error was an illegal address where required.
#include "check.h"

__global__ void write_far(int *memory, unsigned long long distance) { memory[distance + threadIdx.x] = 1; }

__global__ void fill(int *memory, int value) { memory[threadIdx.x] = value; }

int main() {
    int *memory, host[32] = {};
    cudaStream_t stream;
    CHECK(cudaMalloc(&memory, sizeof host));
    CHECK(cudaStreamCreate(&stream));
    fill<<<1, 32>>>(memory, 7);
    CHECK(cudaMemcpy(host, memory, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host[31] == 7);

    write_far<<<1, 32>>>(memory, 1ull << 36);
    SHOW(cudaGetLastError());
    cudaError_t status = cudaDeviceSynchronize();
    std::printf("cudaDeviceSynchronize() -> %d %s\n", int(status), cudaGetErrorName(status));
    std::printf("says: %s\n", cudaGetErrorString(status));
    EXPECT(status == cudaErrorIllegalAddress);

    std::printf("afterwards:\n");
    int *more = nullptr;
    SHOW(cudaPeekAtLastError());
    SHOW(cudaGetLastError());
    SHOW(cudaGetLastError());
    SHOW(cudaMalloc(&more, 1024));
    SHOW(cudaMemcpy(host, memory, sizeof host, cudaMemcpyDeviceToHost));
    SHOW(cudaMemcpyAsync(host, memory, sizeof host, cudaMemcpyDeviceToHost, stream));
    SHOW(cudaMemset(memory, 0, sizeof host));
    fill<<<1, 32>>>(memory, 8);
    SHOW(cudaGetLastError());
    SHOW(cudaStreamSynchronize(stream));
    SHOW(cudaStreamQuery(stream));
    SHOW(cudaDeviceSynchronize());
    SHOW(cudaFree(memory));
    int devices = 0;
    SHOW(cudaGetDeviceCount(&devices));
    EXPECT(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
    EXPECT(host[31] == 7);
    return 0;
}

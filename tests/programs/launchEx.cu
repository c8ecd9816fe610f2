// Launches with attributes, large dynamic shared memory by opt-in, occupancy, and function
// attributes.
#include "check.h"

#include <vector>

__global__ void reverse(const int *from, int *to, int count) {
    extern __shared__ int shared[];
    for (int i = threadIdx.x; i < count; i += blockDim.x) shared[i] = from[blockIdx.x * count + i];
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[blockIdx.x * count + i] = shared[count - 1 - i];
}

__global__ __launch_bounds__(64) void bounded(int *out) {
    __shared__ int local[64];
    local[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = local[63 - threadIdx.x];
}

int main() {
    const int blocks = 3, count = 15000;  // 60,000 bytes of shared memory, more than without opt-in
    const size_t shared = count * sizeof(int);
    std::vector<int> host(blocks * count);
    for (int i = 0; i < blocks * count; i++) host[i] = i * 3;
    int *from, *to;
    CHECK(cudaMalloc(&from, blocks * shared));
    CHECK(cudaMalloc(&to, blocks * shared));
    CHECK(cudaMemcpy(from, host.data(), blocks * shared, cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());  // a copy from pageable memory may still be under way, and the stream below does not wait for it
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(256);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    std::printf("without opt-in -> %s\n", cudaGetErrorName(cudaLaunchKernelEx(&config, reverse, (const int *)from, to, count)));
    cudaGetLastError();
    CHECK(cudaFuncSetAttribute(reverse, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    cudaLaunchAttribute attributes[1] = {};
    int least, greatest;
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    attributes[0].id = cudaLaunchAttributePriority;
    attributes[0].val.priority = greatest;
    config.attrs = attributes;
    config.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&config, reverse, (const int *)from, to, count));
    CHECK(cudaMemcpyAsync(host.data(), to, blocks * shared, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < blocks * count; i++) EXPECT(host[i] == (i / count * count + count - 1 - i % count) * 3);

    cudaFuncAttributes function;
    CHECK(cudaFuncGetAttributes(&function, reverse));
    EXPECT(function.maxDynamicSharedSizeBytes == int(shared));
    EXPECT(function.sharedSizeBytes == 0 && function.maxThreadsPerBlock >= 256);
    CHECK(cudaFuncGetAttributes(&function, bounded));
    EXPECT(function.maxThreadsPerBlock == 64);
    EXPECT(function.sharedSizeBytes == 256);
    bounded<<<1, 128>>>(to);
    std::printf("more threads than the kernel's bound -> %s\n", cudaGetErrorName(cudaGetLastError()));
    bounded<<<1, 64>>>(to);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(host.data(), to, 64 * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < 64; i++) EXPECT(host[i] == 63 - i);
    int resident = 0, grid = 0, block = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, bounded, 64, 0));
    EXPECT(resident >= 1);
    CHECK(cudaOccupancyMaxPotentialBlockSize(&grid, &block, bounded));
    EXPECT(grid >= 1 && block >= 1 && block <= 64);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(from));
    CHECK(cudaFree(to));
    std::printf("launchEx: attributes and shared memory right\n");
    return 0;
}

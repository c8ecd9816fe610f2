// A cooperative launch: all blocks meet several times at a barrier of the whole grid.
#include "check.h"

#include <cooperative_groups.h>

#include <vector>

namespace groups = cooperative_groups;

__global__ void rotate(int *values, int count, int rounds) {
    groups::grid_group grid = groups::this_grid();
    int stride = gridDim.x * blockDim.x, me = blockIdx.x * blockDim.x + threadIdx.x;
    for (int round = 0; round < rounds; round++) {
        int *from = values + round % 2 * count, *to = values + (round + 1) % 2 * count;
        for (int i = me; i < count; i += stride) to[i] = from[(i + 1) % count] + 1;
        grid.sync();
    }
}

int main() {
    int supported = 0;
    CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrCooperativeLaunch, 0));
    if (!supported) {
        std::printf("cooperative: skipped, this device has no cooperative launch\n");
        return 0;
    }
    int count = 4099, rounds = 10, *device;
    std::vector<int> host(count);
    for (int i = 0; i < count; i++) host[i] = i * 3;
    CHECK(cudaMalloc(&device, 2 * count * sizeof(int)));
    CHECK(cudaMemcpy(device, host.data(), count * sizeof(int), cudaMemcpyHostToDevice));
    void *arguments[] = {&device, &count, &rounds};
    const void *function = reinterpret_cast<const void *>(rotate);
    int blocks_per_multiprocessor = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_multiprocessor, rotate, 128, 0));
    EXPECT(blocks_per_multiprocessor >= 1);
    CHECK(cudaLaunchCooperativeKernel(function, dim3(8), dim3(128), arguments, 0, nullptr));
    CHECK(cudaMemcpy(host.data(), device, count * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < count; i++) EXPECT(host[i] == (i + rounds) % count * 3 + rounds);
    // A launch of more blocks than fit on the device at once is refused.
    cudaError_t status = cudaLaunchCooperativeKernel(function, dim3(1 << 20), dim3(128), arguments, 0, nullptr);
    std::printf("too many blocks -> %s\n", cudaGetErrorName(status));
    cudaGetLastError();
    CHECK(cudaFree(device));
    std::printf("cooperative: %d rounds right\n", rounds);
    return 0;
}

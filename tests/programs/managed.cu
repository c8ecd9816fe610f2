// Managed memory: written by the host, changed by a kernel, read by the host again.
#include "check.h"

__global__ void triple(int *values, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] *= 3;
}

__managed__ int managed_variable = 5;

int main() {
    const int count = 100000;
    int *values;
    CHECK(cudaMallocManaged(&values, count * sizeof(int)));
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < count; i++) values[i] = i + round;
        triple<<<(count + 255) / 256, 256>>>(values, count);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < count; i++) EXPECT(values[i] == 3 * (i + round));
    }
    managed_variable = 7;
    triple<<<1, 1>>>(&managed_variable, 1);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    EXPECT(managed_variable == 21);
    CHECK(cudaFree(values));
    std::printf("managed: %d values right\n", count);
    return 0;
}

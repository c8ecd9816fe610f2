// A failing assert in a kernel: the error code at the launch, at the synchronization and
// afterwards. Exits with status 3 if the synchronization reports it.
#undef NDEBUG
#include "check.h"

#include <cassert>

__global__ void must_be_small(const int *values, int *seen) {
    seen[threadIdx.x] = values[threadIdx.x];
    assert(values[threadIdx.x] < 100);
}

int main() {
    int values[4] = {1, 2, 3, 4}, seen[4] = {};
    int *device_values, *device_seen;
    CHECK(cudaMalloc(&device_values, sizeof values));
    CHECK(cudaMalloc(&device_seen, sizeof seen));
    CHECK(cudaMemcpy(device_values, values, sizeof values, cudaMemcpyHostToDevice));
    must_be_small<<<1, 4>>>(device_values, device_seen);
    SHOW(cudaGetLastError());
    SHOW(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(seen, device_seen, sizeof seen, cudaMemcpyDeviceToHost));
    EXPECT(seen[3] == 4);

    values[2] = 100;
    CHECK(cudaMemcpy(device_values, values, sizeof values, cudaMemcpyHostToDevice));
    must_be_small<<<1, 4>>>(device_values, device_seen);
    SHOW(cudaGetLastError());
    cudaError_t status = cudaDeviceSynchronize();
    std::printf("cudaDeviceSynchronize() -> %d %s\n", int(status), cudaGetErrorName(status));
    std::printf("says: %s\n", cudaGetErrorString(status));
    SHOW(cudaMemcpy(seen, device_seen, sizeof seen, cudaMemcpyDeviceToHost));
    SHOW(cudaGetLastError());
    return status == cudaErrorAssert ? 3 : 1;
}

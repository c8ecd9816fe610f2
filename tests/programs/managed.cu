// Managed memory: written by the host, changed by a kernel, read by the host again.
#include "check.h"

__global__ void triple(int *values, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] *= 3;
}

__managed__ int managed_variable = 5;
__managed__ int managed_table[3000] = {1, 2, 3};
__managed__ int *managed_pointer;

// Reaches managed memory through a pointer that is itself a managed variable.
__global__ void through_pointer(int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) managed_pointer[i] += managed_table[i % 3];
}

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
    EXPECT(managed_variable == 5 && managed_table[2] == 3 && managed_table[2999] == 0);
    managed_variable = 7;
    triple<<<1, 1>>>(&managed_variable, 1);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    EXPECT(managed_variable == 21);

    for (int i = 0; i < count; i++) values[i] = i;
    managed_pointer = values;
    managed_table[1] = 20;
    through_pointer<<<(count + 255) / 256, 256>>>(count);
    CHECK(cudaDeviceSynchronize());
    const int add[] = {1, 20, 3};
    for (int i = 0; i < count; i++) EXPECT(values[i] == i + add[i % 3]);
    // The device fills and copies it, while the host writes other parts.
    CHECK(cudaMemset(values, 0, count * sizeof(int) / 2));
    CHECK(cudaMemcpy(values + count - 3000, managed_table, sizeof managed_table, cudaMemcpyDefault));
    CHECK(cudaDeviceSynchronize());
    EXPECT(values[0] == 0 && values[count / 2 - 1] == 0 && values[count / 2] == count / 2 + add[count / 2 % 3]);
    EXPECT(values[count - 2999] == 20 && values[count - 1] == 0);
    int back = 0;
    managed_variable = 11;
    CHECK(cudaMemcpy(&back, &managed_variable, sizeof back, cudaMemcpyDefault));
    EXPECT(back == 11);
    CHECK(cudaMemcpyFromSymbol(&back, managed_variable, sizeof back));
    EXPECT(back == 11);
    cudaPointerAttributes attributes;
    for (const void *pointer : {static_cast<const void *>(values + 5), static_cast<const void *>(&managed_variable)}) {
        CHECK(cudaPointerGetAttributes(&attributes, pointer));
        EXPECT(attributes.type == cudaMemoryTypeManaged && attributes.devicePointer == pointer);
        EXPECT(attributes.hostPointer == pointer);
    }
    // A kernel between frees in a row, of which each waits for the device.
    int *others[4];
    for (int *&other : others) CHECK(cudaMallocManaged(&other, 5000 * sizeof(int)));
    for (int i = 0; i < count; i++) values[i] = i;
    for (int round = 0, power = 3; round < 3; round++, power *= 3) {
        CHECK(cudaFree(others[round]));
        triple<<<(count + 255) / 256, 256>>>(values, count);
        CHECK(cudaFree(round < 2 ? nullptr : others[3]));
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < count / 10; i++) EXPECT(values[i] == power * i);
    }
    CHECK(cudaFree(values));
    std::printf("managed: %d values right\n", count);
    return 0;
}

// Adds two vectors whose length is no multiple of the block size.
#include "check.h"

#include <vector>

__global__ void add(const float *a, const float *b, float *sum, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) sum[i] = a[i] + b[i];
}

int main() {
    const int count = 50001;
    const size_t bytes = count * sizeof(float);
    std::vector<float> a(count), b(count), sum(count, -1.0f);
    Numbers numbers(1);
    for (int i = 0; i < count; i++) {
        a[i] = float(numbers.next() % 1000);
        b[i] = float(numbers.next() % 1000) * 0.5f;
    }
    float *device_a, *device_b, *device_sum;
    CHECK(cudaMalloc(&device_a, bytes));
    CHECK(cudaMalloc(&device_b, bytes));
    CHECK(cudaMalloc(&device_sum, bytes));
    CHECK(cudaMemcpy(device_a, a.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(device_b, b.data(), bytes, cudaMemcpyHostToDevice));
    add<<<(count + 255) / 256, 256>>>(device_a, device_b, device_sum, count);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(sum.data(), device_sum, bytes, cudaMemcpyDeviceToHost));
    for (int i = 0; i < count; i++) EXPECT(sum[i] == a[i] + b[i]);
    CHECK(cudaFree(device_a));
    CHECK(cudaFree(device_b));
    CHECK(cudaFree(device_sum));
    std::printf("vectorAdd: %d sums right\n", count);
    return 0;
}

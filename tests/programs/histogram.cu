// A histogram with atomics in shared memory, merged by atomics in global memory, and the other
// atomic operations.
#include "check.h"

#include <vector>

__global__ void histogram(const unsigned char *data, int count, unsigned *bins) {
    __shared__ unsigned local[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) local[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        atomicAdd(&local[data[i]], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        if (local[i]) atomicAdd(&bins[i], local[i]);
}

struct Results {
    int low, high, bits_or, bits_and, bits_xor, wrapped, exchanged, swapped;
    unsigned long long wide;
    float real;
};

__global__ void others(Results *r) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicMin(&r->low, i - 100);
    atomicMax(&r->high, i * 3);
    atomicOr(&r->bits_or, 1 << (i % 31));
    atomicAnd(&r->bits_and, ~(1 << (i % 16)));
    atomicXor(&r->bits_xor, i);
    atomicInc(reinterpret_cast<unsigned *>(&r->wrapped), 99u);
    if (i == 17) atomicExch(&r->exchanged, 4711);
    for (int seen = r->swapped, assumed; true;) {  // a sum by compare-and-swap
        assumed = seen;
        seen = atomicCAS(&r->swapped, assumed, assumed + i);
        if (seen == assumed) break;
    }
    atomicAdd(&r->wide, 0x100000001ull);
    atomicAdd(&r->real, 0.5f);
}

int main() {
    const int count = 300007;
    std::vector<unsigned char> data(count);
    std::vector<unsigned> expected(256, 0), bins(256);
    Numbers numbers(5);
    for (unsigned char &byte : data) {
        byte = (unsigned char)(numbers.next() % 200 + numbers.next() % 57);
        expected[byte]++;
    }
    unsigned char *device_data;
    unsigned *device_bins;
    CHECK(cudaMalloc(&device_data, count));
    CHECK(cudaMalloc(&device_bins, 256 * sizeof(unsigned)));
    CHECK(cudaMemcpy(device_data, data.data(), count, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(device_bins, 0, 256 * sizeof(unsigned)));
    histogram<<<16, 256>>>(device_data, count, device_bins);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(bins.data(), device_bins, 256 * sizeof(unsigned), cudaMemcpyDeviceToHost));
    for (int i = 0; i < 256; i++) EXPECT(bins[i] == expected[i]);
    CHECK(cudaFree(device_data));
    CHECK(cudaFree(device_bins));
    std::printf("histogram: %d bytes, bin 0 %u, bin 100 %u, bin 255 %u\n", count, bins[0], bins[100], bins[255]);

    const int blocks = 4, threads = 64, total = blocks * threads;
    Results host = {1000, -1000, 0, -1, 0, 0, 0, 0, 0, 0.0f}, *device;
    CHECK(cudaMalloc(&device, sizeof host));
    CHECK(cudaMemcpy(device, &host, sizeof host, cudaMemcpyHostToDevice));
    others<<<blocks, threads>>>(device);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(&host, device, sizeof host, cudaMemcpyDeviceToHost));
    int bits_xor = 0;
    for (int i = 0; i < total; i++) bits_xor ^= i;
    EXPECT(host.low == -100);
    EXPECT(host.high == (total - 1) * 3);
    EXPECT(host.bits_or == 0x7fffffff);
    EXPECT(host.bits_and == int(0xffff0000));
    EXPECT(host.bits_xor == bits_xor);
    EXPECT(host.wrapped == total % 100);
    EXPECT(host.exchanged == 4711);
    EXPECT(host.swapped == total * (total - 1) / 2);
    EXPECT(host.wide == total * 0x100000001ull);
    EXPECT(host.real == total * 0.5f);
    CHECK(cudaFree(device));
    std::printf("histogram: ten atomic operations right\n");
    return 0;
}

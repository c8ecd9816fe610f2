// Ten thousand launches of tiny kernels with parameters of many sizes, on one stream and on
// several.
#include "check.h"

#include <vector>

struct Large {
    int values[200];
};

__global__ void one(unsigned *value) { *value = *value * 5 + 1; }

__global__ void mixed(unsigned *value, char a, short b, int c, long long d, float e, double f, bool g) {
    *value += unsigned(a) + unsigned(b) + unsigned(c) + unsigned(d) + unsigned(e) + unsigned(f) + (g ? 1u : 0u);
}

__global__ void large(unsigned *value, Large parameter, int last) {
    unsigned sum = 0;
    for (int x : parameter.values) sum += x;
    *value = *value * 3 + sum + last;
}

template <int N> __global__ void numbered(unsigned *value) { *value = *value * 7 + N; }

template <int N> static void all_numbered(unsigned *device, unsigned &host, cudaStream_t stream) {
    numbered<N><<<1, 1, 0, stream>>>(device);
    host = host * 7 + N;
    if constexpr (N > 0) all_numbered<N - 1>(device, host, stream);
}

int main() {
    const int launches = 10000, streams = 4;
    unsigned *device, expected[streams] = {}, found[streams];
    cudaStream_t stream[streams];
    CHECK(cudaMalloc(&device, sizeof found));
    CHECK(cudaMemset(device, 0, sizeof found));
    CHECK(cudaDeviceSynchronize());
    for (cudaStream_t &s : stream) CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    Large parameter;
    for (int i = 0; i < launches; i++) {
        int s = i % streams;
        unsigned &value = expected[s];
        switch (i % 5) {
        case 0:
        case 1:
        case 2:
            one<<<1, 1, 0, stream[s]>>>(device + s);
            value = value * 5 + 1;
            break;
        case 3:
            mixed<<<1, 1, 0, stream[s]>>>(device + s, 1, 2, i, 40000000000ll + i, 5.5f, 6.25, i % 2);
            value += 1 + 2 + unsigned(i) + unsigned(40000000000ll + i) + 5 + 6 + unsigned(i % 2);
            break;
        default:
            unsigned sum = 0;
            for (int k = 0; k < 200; k++) sum += parameter.values[k] = i + k;
            large<<<1, 1, 0, stream[s]>>>(device + s, parameter, i);
            value = value * 3 + sum + i;
        }
    }
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    all_numbered<40>(device, expected[0], stream[0]);
    CHECK(cudaGetLastError());
    CHECK(cudaStreamSynchronize(stream[0]));
    CHECK(cudaMemcpy(found, device, sizeof found, cudaMemcpyDeviceToHost));
    for (int s = 0; s < streams; s++) EXPECT(found[s] == expected[s]);
    for (cudaStream_t s : stream) CHECK(cudaStreamDestroy(s));
    CHECK(cudaFree(device));
    std::printf("manyKernels: %d launches right, last value %u\n", launches, found[0]);
    return 0;
}

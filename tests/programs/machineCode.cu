// Machine code without PTX: the driver has nothing to compile. The simulated driver accepts such an
// image and knows its kernels and variables, but computes nothing.
#include "driver.h"

#include <cstring>

struct Wide {
    double factor;
    char tail[5];
};

__device__ int table[4] = {2, 3, 5, 7};
__device__ int zeros[100];

__global__ void scale(Wide wide, int *out, int value) { out[threadIdx.x] = value * int(wide.factor) * table[threadIdx.x % 4]; }

int main() {
    CHECK(cudaFree(nullptr));
    cudaFuncAttributes attributes;
    cudaError_t loaded = cudaFuncGetAttributes(&attributes, scale);
    if (loaded == cudaErrorNoKernelImageForDevice) {
        std::printf("machineCode: no code for this GPU\n");
        return 0;
    }
    CHECK(loaded);

    DRIVER_BY_RUNTIME(cuFuncGetParamInfo);
    cudaFunction_t function;
    CHECK(cudaGetFuncBySymbol(&function, reinterpret_cast<const void *>(scale)));
    for (size_t parameter = 0;; parameter++) {
        size_t offset = 0, size = 0;
        CUresult result = cuFuncGetParamInfo_(reinterpret_cast<CUfunction>(function), parameter, &offset, &size);
        std::printf("parameter %zu -> %d: %zu bytes at %zu\n", parameter, int(result), size, offset);
        if (result != CUDA_SUCCESS) break;
    }

    size_t bytes = 0;
    CHECK(cudaGetSymbolSize(&bytes, zeros));
    int primes[4], first[2] = {-1, -1};
    CHECK(cudaMemcpyFromSymbol(primes, table, sizeof primes));
    CHECK(cudaMemcpyFromSymbol(first, zeros, sizeof first));
    std::printf("table %d %d %d %d, zeros %zu bytes: %d %d\n", primes[0], primes[1], primes[2], primes[3], bytes, first[0], first[1]);
    for (int &prime : primes) prime += 10;
    CHECK(cudaMemcpyToSymbol(table, primes, sizeof primes));

    constexpr int COUNT = 64;
    int *out, found[COUNT];
    CHECK(cudaMalloc(&out, sizeof found));
    CHECK(cudaMemset(out, 0, sizeof found));
    scale<<<1, COUNT>>>(Wide{3.0, "tail"}, out, 2);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(found, out, sizeof found, cudaMemcpyDeviceToHost));
    int right = 0, untouched = 0;
    for (int i = 0; i < COUNT; i++) {
        right += found[i] == 2 * 3 * primes[i % 4];
        untouched += found[i] == 0;
    }
    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    EXPECT(std::strstr(device.name, "simulated") ? untouched == COUNT : right == COUNT);
    std::printf("machineCode: the kernel %s\n", right ? "computed" : "was not run");
    CHECK(cudaFree(out));
    return 0;
}

// printf in a kernel: formats, several launches, and the order relative to the host's own output.
#include "check.h"

__global__ void formats(double real, const char *none) {
    std::printf("device: no argument\n");
    std::printf("device: %d %u %x %X %o %c %%\n", -5, 5u, 0xbeef, 0xBEEF, 8, 'z');
    std::printf("device: %lld %llu %llx\n", -1234567890123ll, 1234567890123ull, 0xdeadbeefcafeull);
    std::printf("device: %f %.2f %10.3f %-8.1f| %e %g\n", real, real, real, real, real, real);
    std::printf("device: %5d|%-5d|%05d|%+d\n", 42, 42, 42, 42);
    std::printf("device: string '%s' and '%8s'\n", "text", "right");
    if (none == nullptr) std::printf("device: three more %s %d %s\n", "one", 2, "three");
}

// Threads print one after the other, so that the order of the lines is defined.
__global__ void in_turn(int launch) {
    for (unsigned turn = 0; turn < blockDim.x; turn++) {
        if (threadIdx.x == turn) std::printf("device: launch %d thread %u of %u\n", launch, threadIdx.x, blockDim.x);
        __syncthreads();
    }
}

int main() {
    std::printf("host: before\n");
    std::fflush(stdout);
    formats<<<1, 1>>>(3.14159265, nullptr);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    std::printf("host: between\n");
    std::fflush(stdout);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    for (int launch = 0; launch < 3; launch++) in_turn<<<1, 3, 0, stream>>>(launch);
    CHECK(cudaGetLastError());
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamDestroy(stream));
    size_t buffer = 0;
    CHECK(cudaDeviceGetLimit(&buffer, cudaLimitPrintfFifoSize));
    EXPECT(buffer >= 1 << 20);
    std::printf("host: after\n");
    return 0;
}

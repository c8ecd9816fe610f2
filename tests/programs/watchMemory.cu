// Copies to pinned memory that the program only watches: it makes no call until it sees the bytes.
#include "check.h"

#include <chrono>

__global__ void fill(unsigned char *bytes, size_t count, unsigned char value) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) bytes[i] = value;
}

// Returns true once the first and the last byte have the value; gives up after a while.
static bool arrives(const volatile unsigned char *bytes, size_t count, unsigned char value) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (std::chrono::steady_clock::now() < end)
        if (bytes[0] == value && bytes[count - 1] == value) return true;
    return false;
}

int main() {
    const size_t largest = 4 << 20, pitch = 512;
    unsigned char *device, *pinned;
    CHECK(cudaMalloc(&device, largest));
    CHECK(cudaMallocHost(&pinned, largest));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    // Sizes that travel in one frame, and one that does not.
    for (const size_t size : {size_t{1}, size_t{4096}, size_t{65536}, largest}) {
        for (int round = 1; round <= 20; round++) {
            fill<<<8, 128, 0, stream>>>(device, size, round);
            CHECK(cudaMemcpyAsync(pinned, device, size, cudaMemcpyDeviceToHost, stream));
            EXPECT(arrives(pinned, size, round));
        }
        std::printf("%zu bytes arrive without a further call\n", size);
    }
    for (int round = 101; round <= 120; round++) {
        fill<<<8, 128, 0, stream>>>(device, largest, round);
        CHECK(cudaMemcpy2DAsync(pinned, pitch, device, pitch, 100, 16, cudaMemcpyDeviceToHost, stream));
        EXPECT(arrives(pinned, 15 * pitch + 100, round));
    }
    std::printf("16 rows arrive without a further call\n");

    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFree(device));
    return 0;
}

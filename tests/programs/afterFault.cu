// Behind a kernel that fails, callbacks run once with its error, and host functions do not run.
// Copies that these would have preceded end with the error.
#include "driver.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

__global__ void fail(int *nowhere, long long clocks) {
    const long long begun = clock64();
    while (clock64() - begun < clocks) {}
    *nowhere = 1;
}

static std::atomic<int> called{0}, reported{0}, ran{0};

static void CUDART_CB callback(cudaStream_t, cudaError_t status, void *) {
    reported = int(status);
    called++;
}

static void CUDART_CB function(void *) { ran++; }

int main() {
    const size_t bytes = 40 << 20;
    unsigned char *pinned, *device;
    cudaStream_t stream;
    CHECK(cudaMallocHost(&pinned, bytes));
    std::memset(pinned, 1, bytes);
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamAddCallback(stream, callback, nullptr, 0));
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(called == 1 && reported == 0);
    fail<<<1, 1, 0, stream>>>(nullptr, 20000000);
    // Enqueued while the kernel runs, or refused with its error.
    const cudaError_t queued[] = {
        cudaStreamAddCallback(stream, callback, nullptr, 0),
        cudaLaunchHostFunc(stream, function, nullptr),
        cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyHostToDevice, stream),
    };
    for (cudaError_t code : queued) EXPECT(code == cudaSuccess || code == cudaErrorIllegalAddress);
    std::printf("synchronize: %s\n", cudaGetErrorName(cudaStreamSynchronize(stream)));
    // A call that the driver took runs once.
    for (int i = 0; i < 2000 && called < 2 && queued[0] == cudaSuccess; i++)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT(queued[0] != cudaSuccess || (called == 2 && reported != 0));
    EXPECT(ran == 0);
    std::printf("device: %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
    std::printf("afterFault: callback and copy end\n");
    return 0;
}

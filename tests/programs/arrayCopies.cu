// Copies out of arrays to pinned memory, behind a host function that waits for the thread that
// enqueues them.
#include "check.h"
#include "pattern.h"

#include <atomic>
#include <thread>
#include <vector>

static void CUDART_CB wait(void *enqueued) {
    while (!*static_cast<std::atomic<bool> *>(enqueued)) std::this_thread::yield();
}

// Copies of the whole array and of a part, then one that asks for too much.
static void copies(cudaArray_t array, size_t width, size_t height) {
    const size_t element = sizeof(float2), bytes = width * element, x = 3 * element, y = 2, part = bytes - 2 * x;
    std::vector<unsigned char> source(bytes * height);
    unsigned char *pinned;
    cudaStream_t stream;
    std::atomic<bool> enqueued{false};
    CHECK(cudaMallocHost(&pinned, 2 * bytes * height));
    unsigned char *inner = pinned + bytes * height;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    fill(source.data(), source.size(), 11);
    CHECK(cudaMemcpy2DToArray(array, 0, 0, source.data(), bytes, bytes, height, cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());  // the copy from pageable memory may still be under way
    CHECK(cudaLaunchHostFunc(stream, wait, &enqueued));
    CHECK(cudaMemcpy2DFromArrayAsync(pinned, bytes, array, 0, 0, bytes, height, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaMemcpy2DFromArrayAsync(inner, bytes, array, x, y, part, height - y, cudaMemcpyDeviceToHost, stream));
    enqueued = true;
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(holds(pinned, bytes * height, 11));
    for (size_t row = 0; row < height - y; row++)
        for (size_t i = 0; i < part; i++) EXPECT(inner[row * bytes + i] == pattern((row + y) * bytes + x + i, 11));
    EXPECT(cudaMemcpy2DFromArrayAsync(pinned, bytes, array, 0, 1, bytes, height, cudaMemcpyDeviceToHost, stream) ==
           cudaErrorInvalidValue);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFreeHost(pinned));
}

// An array of a size that travels in one frame, or one that does not.
static void array(size_t width, size_t height) {
    cudaArray_t array;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float2>();
    CHECK(cudaMallocArray(&array, &format, width, height));
    copies(array, width, height);
    CHECK(cudaFreeArray(array));
    std::printf("an array of %zux%zu behind a host function: its thread proceeds\n", width, height);
}

int main() {
    array(30, 20);
    array(500, 400);
    return 0;
}

// Eight host threads, each with its own streams, events and memory, and one buffer that all of them
// add to. A second build has a default stream per thread (threadsPerThread), so that each thread's
// default-stream part runs on its own stream.
#include "check.h"

#include <thread>
#include <vector>

__global__ void mix(unsigned *values, int count, unsigned factor, unsigned add) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = values[i] * factor + add;
}

__global__ void add_one(unsigned *counter) { atomicAdd(counter, 1u); }

const int THREADS = 8, ROUNDS = 30, COUNT = 2000;

static void work(int thread, unsigned *common) {
    CHECK(cudaSetDevice(0));
    const size_t bytes = COUNT * sizeof(unsigned);
    cudaStream_t streams[2];
    unsigned *memory[2], *pinned;
    cudaEvent_t event;
    for (int s = 0; s < 2; s++) {
        CHECK(cudaStreamCreateWithFlags(&streams[s], cudaStreamNonBlocking));
        CHECK(cudaMalloc(&memory[s], bytes));
        CHECK(cudaMemsetAsync(memory[s], 0, bytes, streams[s]));
    }
    CHECK(cudaHostAlloc(&pinned, bytes, cudaHostAllocDefault));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    unsigned expected[2] = {0, 0};
    for (int round = 0; round < ROUNDS; round++) {
        for (int s = 0; s < 2; s++) {
            unsigned factor = 3 + thread, add = round * 2 + s;
            mix<<<(COUNT + 127) / 128, 128, 0, streams[s]>>>(memory[s], COUNT, factor, add);
            expected[s] = expected[s] * factor + add;
            add_one<<<1, 32, 0, streams[s]>>>(common);
        }
        CHECK(cudaGetLastError());
        if (round % 10 == 9) {
            // The second stream's data are copied out on the first stream.
            CHECK(cudaEventRecord(event, streams[1]));
            CHECK(cudaStreamWaitEvent(streams[0], event, 0));
            CHECK(cudaMemcpyAsync(pinned, memory[1], bytes, cudaMemcpyDeviceToHost, streams[0]));
            CHECK(cudaStreamSynchronize(streams[0]));
            for (int i = 0; i < COUNT; i++) EXPECT(pinned[i] == expected[1]);
            void *extra;
            CHECK(cudaMalloc(&extra, 1000 + thread));
            CHECK(cudaFree(extra));
        }
    }
    std::vector<unsigned> host(COUNT);
    CHECK(cudaMemcpyAsync(host.data(), memory[0], bytes, cudaMemcpyDeviceToHost, streams[0]));
    CHECK(cudaStreamSynchronize(streams[0]));
    for (unsigned value : host) EXPECT(value == expected[0]);

    // The default stream: legacy or per thread.
    CHECK(cudaMemset(memory[0], 0, bytes));
    for (int round = 0; round < 5; round++) mix<<<(COUNT + 127) / 128, 128>>>(memory[0], COUNT, 2, thread);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(host.data(), memory[0], bytes, cudaMemcpyDeviceToHost));
    for (unsigned value : host) EXPECT(value == unsigned(thread) * 31);
    // Each thread has its own last error.
    if (thread % 2) {
        EXPECT(cudaSetDevice(1000 + thread) == cudaErrorInvalidDevice);
        EXPECT(cudaGetLastError() == cudaErrorInvalidDevice);
    } else {
        EXPECT(cudaGetLastError() == cudaSuccess);
    }
    for (int s = 0; s < 2; s++) {
        CHECK(cudaStreamDestroy(streams[s]));
        CHECK(cudaFree(memory[s]));
    }
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaEventDestroy(event));
}

int main() {
    unsigned *common, total = 0;
    CHECK(cudaMalloc(&common, sizeof(unsigned)));
    CHECK(cudaMemset(common, 0, sizeof(unsigned)));
    CHECK(cudaDeviceSynchronize());
    std::vector<std::thread> threads;
    for (int thread = 0; thread < THREADS; thread++) threads.emplace_back(work, thread, common);
    for (std::thread &thread : threads) thread.join();
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&total, common, sizeof total, cudaMemcpyDeviceToHost));
    EXPECT(total == THREADS * ROUNDS * 2 * 32);
    CHECK(cudaFree(common));
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
    const char *kind = "per thread";
#else
    const char *kind = "legacy";
#endif
    std::printf("threads: %d threads right, default stream %s\n", THREADS, kind);
    return 0;
}

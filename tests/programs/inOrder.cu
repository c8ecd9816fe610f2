// Order after synchronizing a stream that has only copied from pageable memory, and after events on
// streams without work. Later work on another stream or from another thread sees the copied bytes.
#include "check.h"

#include <atomic>
#include <thread>
#include <vector>

__global__ void sum(const int *values, int count, unsigned long long *total) {
    unsigned long long mine = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) mine += values[i];
    atomicAdd(total, mine);
}

static unsigned long long fill(std::vector<int> &values, int seed) {
    unsigned long long total = 0;
    for (size_t i = 0; i < values.size(); i++) total += values[i] = static_cast<int>((seed * 31 + i * 7) % 1000);
    return total;
}

static void check(const int *device, int count, unsigned long long *total, cudaStream_t stream, unsigned long long wanted) {
    CHECK(cudaMemsetAsync(total, 0, sizeof *total, stream));
    sum<<<4, 128, 0, stream>>>(device, count, total);
    unsigned long long seen = 0;
    CHECK(cudaMemcpyAsync(&seen, total, sizeof seen, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(seen == wanted);
}

int main() {
    // A size that travels with its request, and one that does not.
    for (const int count : {4096, 1 << 18}) {
        int *device;
        unsigned long long *total;
        CHECK(cudaMalloc(&device, count * sizeof(int)));
        CHECK(cudaMalloc(&total, sizeof *total));
        cudaStream_t copies, kernels;
        CHECK(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking));
        CHECK(cudaStreamCreateWithFlags(&kernels, cudaStreamNonBlocking));
        cudaEvent_t event;
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        std::vector<int> values(count);

        for (int round = 0; round < 50; round++) {
            const cudaStream_t stream = round % 2 ? copies : nullptr;
            const unsigned long long wanted = fill(values, round);
            CHECK(cudaMemcpyAsync(device, values.data(), count * sizeof(int), cudaMemcpyHostToDevice, stream));
            CHECK(cudaStreamSynchronize(stream));
            check(device, count, total, kernels, wanted);
            // No work is left on either stream.
            CHECK(cudaEventRecord(event, kernels));
            CHECK(cudaEventSynchronize(event));
            EXPECT(cudaEventQuery(event) == cudaSuccess);
            CHECK(cudaStreamWaitEvent(copies, event, 0));
        }

        // One thread copies, another uses the copied bytes as soon as the first reports the copy.
        std::atomic<int> ready{0}, used{0};
        unsigned long long wanted = 0;
        std::thread user([&] {
            for (int round = 1; round <= 50; round++) {
                while (ready.load() != round) std::this_thread::yield();
                check(device, count, total, kernels, wanted);
                used = round;
            }
        });
        for (int round = 1; round <= 50; round++) {
            wanted = fill(values, 100 + round);
            CHECK(cudaMemcpyAsync(device, values.data(), count * sizeof(int), cudaMemcpyHostToDevice, copies));
            CHECK(cudaStreamSynchronize(copies));
            ready = round;
            while (used.load() != round) std::this_thread::yield();
        }
        user.join();
        CHECK(cudaFree(total));
        CHECK(cudaFree(device));
    }
    std::printf("inOrder: right\n");
    return 0;
}

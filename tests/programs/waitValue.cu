// A stream waits for a value in device memory while one thread keeps submitting to it, until
// another thread writes the value through another stream. A real driver blocks the submitting
// thread after about a thousand entries. The other thread must still make progress, or both wait
// for ever.
#include "driver.h"

#include <atomic>
#include <chrono>
#include <thread>

__global__ void count_one(unsigned *counter) { atomicAdd(counter, 1u); }

const int ENTRIES = 2000;

enum class Release { WriteValue, Copy, Kernel };

__global__ void store(unsigned *flag, unsigned value) { *flag = value; }

static void run(Release how, const char *name) {
    DRIVER_BY_RUNTIME(cuStreamWaitValue32);
    DRIVER_BY_RUNTIME(cuStreamWriteValue32);
    cudaStream_t blocked, other;
    unsigned *flag, *counter, *host;
    CHECK(cudaStreamCreateWithFlags(&blocked, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&flag, 256));
    CHECK(cudaMalloc(&counter, sizeof(unsigned)));
    CHECK(cudaHostAlloc(&host, sizeof(unsigned), cudaHostAllocDefault));
    CHECK(cudaMemset(flag, 0, 256));
    CHECK(cudaMemset(counter, 0, sizeof(unsigned)));
    CHECK(cudaDeviceSynchronize());
    count_one<<<1, 1, 0, other>>>(counter);  // both kernels are loaded before anything waits
    store<<<1, 1, 0, other>>>(flag, 0);
    CHECK(cudaDeviceSynchronize());
    *host = 1;
    CUdeviceptr address = reinterpret_cast<CUdeviceptr>(flag);

    std::atomic<int> submitted{0};
    std::thread submitter([&] {
        CHECK(cudaSetDevice(0));  // the driver's own functions need a context in this thread
        CHECK_DRIVER(cuStreamWaitValue32_(blocked, address, 1, CU_STREAM_WAIT_VALUE_GEQ));
        for (int i = 0; i < ENTRIES; i++) {
            count_one<<<1, 1, 0, blocked>>>(counter);
            submitted++;
        }
        CHECK(cudaGetLastError());
    });
    // Released when the submitter has finished, or has not progressed for a while: then the driver
    // blocks it.
    int last = -1, still = 0;
    while (submitted < ENTRIES && still < 50) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        int now = submitted;
        still = now == last && now > 0 ? still + 1 : 0;
        last = now;
    }
    EXPECT(submitted > 500);
    // The blocked thread may hold the stream's lock in the driver, so that a query of that stream
    // would block, too.
    switch (how) {
    case Release::WriteValue:
        CHECK_DRIVER(cuStreamWriteValue32_(other, address, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
        break;
    case Release::Copy:
        CHECK(cudaMemcpyAsync(flag, host, sizeof(unsigned), cudaMemcpyHostToDevice, other));
        break;
    case Release::Kernel:
        store<<<1, 1, 0, other>>>(flag, 2);
        CHECK(cudaGetLastError());
        break;
    }
    submitter.join();
    CHECK(cudaStreamSynchronize(blocked));
    CHECK(cudaStreamSynchronize(other));
    unsigned total = 0;
    CHECK(cudaMemcpy(&total, counter, sizeof total, cudaMemcpyDeviceToHost));
    EXPECT(total == ENTRIES + 1);
    CHECK(cudaFree(flag));
    CHECK(cudaFree(counter));
    CHECK(cudaFreeHost(host));
    CHECK(cudaStreamDestroy(blocked));
    CHECK(cudaStreamDestroy(other));
    std::printf("waitValue: %d entries ran after a release by %s\n", ENTRIES, name);
    std::fflush(stdout);
}

int main() {
    CHECK(cudaFree(nullptr));
    run(Release::WriteValue, "a stream write");
    run(Release::Copy, "a copy");
    run(Release::Kernel, "a kernel");
    return 0;
}

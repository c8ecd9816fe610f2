// Streams that stand still, with more copies than anything buffers: other streams proceed, and so
// does the thread that a host function waits for.
#include "driver.h"
#include "pattern.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

// A stream that waits until `release` writes a value through another one.
struct Standing {
    cudaStream_t stream, other;
    unsigned *flag;

    Standing() {
        DRIVER_BY_RUNTIME(cuStreamWaitValue32);
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        CHECK(cudaMalloc(&flag, 256));
        CHECK(cudaMemset(flag, 0, 256));
        CHECK(cudaDeviceSynchronize());
        CHECK_DRIVER(cuStreamWaitValue32_(stream, address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
    }

    CUdeviceptr address() const { return reinterpret_cast<CUdeviceptr>(flag); }

    void release() {
        DRIVER_BY_RUNTIME(cuStreamWriteValue32);
        EXPECT(cudaStreamQuery(stream) == cudaErrorNotReady);
        CHECK_DRIVER(cuStreamWriteValue32_(other, address(), 1, 0));
        CHECK(cudaStreamSynchronize(stream));
    }

    ~Standing() {
        CHECK(cudaStreamDestroy(stream));
        CHECK(cudaStreamDestroy(other));
        CHECK(cudaFree(flag));
    }
};

// Memory for copies while streams stand still: allocations and frees may wait for all streams.
struct Buffers {
    static const size_t size = 5 << 20;
    unsigned char *device, *pinned;
    std::vector<unsigned char> pageable;

    Buffers() : pageable(size) {
        CHECK(cudaMalloc(&device, size));
        CHECK(cudaMallocHost(&pinned, size));
    }

    // Copies to the device and back on a stream, in bulk, from pageable and from pinned memory.
    void round_trip(cudaStream_t stream, unsigned seed) {
        fill(pageable.data(), size, seed);
        CHECK(cudaMemcpyAsync(device, pageable.data(), size, cudaMemcpyHostToDevice, stream));
        CHECK(cudaMemcpyAsync(pinned, device, size, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        EXPECT(holds(pinned, size, seed));
        fill(pinned, size, seed + 1);
        CHECK(cudaMemcpyAsync(device, pinned, size, cudaMemcpyHostToDevice, stream));
        CHECK(cudaMemcpyAsync(pageable.data(), device, size, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        EXPECT(holds(pageable.data(), size, seed + 1));
    }

    ~Buffers() {
        CHECK(cudaFreeHost(pinned));
        CHECK(cudaFree(device));
    }
};

// Many copies of `size` bytes, from pinned memory, wait on a stream; another one works meanwhile. A
// driver whose queue is full blocks the thread that enqueues them.
static void many(size_t size, int count, const char *name) {
    Buffers buffers;
    unsigned char *device, *pinned;
    CHECK(cudaMalloc(&device, size * count));
    CHECK(cudaMallocHost(&pinned, size * count));
    fill(pinned, size * count, 3);
    Standing standing;
    std::atomic<int> enqueued{0};
    std::thread submitter([&] {
        for (; enqueued < count; enqueued++) {
            const size_t at = enqueued * size;
            CHECK(cudaMemcpyAsync(device + at, pinned + at, size, cudaMemcpyHostToDevice, standing.stream));
        }
    });
    for (int last = -1, still = 0; enqueued < count && still < 50; last = enqueued) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        still = enqueued == last ? still + 1 : 0;
    }
    // No call of this program reads from the connection of a remote card meanwhile.
    std::this_thread::sleep_for(std::chrono::seconds(1));
    for (unsigned round = 0; round < 3; round++) buffers.round_trip(standing.other, round);
    standing.release();
    submitter.join();
    buffers.round_trip(standing.stream, 9);
    std::memset(pinned, 0, size * count);
    CHECK(cudaMemcpy(pinned, device, size * count, cudaMemcpyDeviceToHost));
    EXPECT(holds(pinned, size * count, 3));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFree(device));
    std::printf("%s: another stream proceeds\n", name);
    std::fflush(stdout);
}

// The host function waits for `enqueued`, then writes `bytes`.
struct Task {
    std::atomic<bool> enqueued{false};
    unsigned char *bytes = nullptr;
    size_t count = 0;
};

static void CUDART_CB work(void *data) {
    Task *task = static_cast<Task *>(data);
    while (!task->enqueued) std::this_thread::yield();
    if (task->bytes) fill(task->bytes, task->count, 7);
}

// A copy of a few rows out of a large pinned block, which a host function writes that waits for the
// thread that enqueues the copy.
static void rows() {
    const size_t width = 250, pitch = 512, height = 40, block = 20 << 20;
    unsigned char *device, *pinned;
    std::vector<unsigned char> back(width * height);
    cudaStream_t stream;
    Task task;
    CHECK(cudaMalloc(&device, width * height));
    CHECK(cudaMallocHost(&pinned, block));
    std::memset(pinned, 0, block);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    task.bytes = pinned, task.count = height * pitch;
    CHECK(cudaLaunchHostFunc(stream, work, &task));
    CHECK(cudaMemcpy2DAsync(device, width, pinned, pitch, width, height, cudaMemcpyHostToDevice, stream));
    task.enqueued = true;
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(back.data(), device, back.size(), cudaMemcpyDeviceToHost));
    for (size_t y = 0; y < height; y++)
        for (size_t x = 0; x < width; x++) EXPECT(back[y * width + x] == pattern(y * pitch + x, 7));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFree(device));
    std::printf("a few rows behind a host function: its thread proceeds\n");
}

// A copy on a stream that stands still fills pinned memory. Another stream, behind an event, copies
// that memory to the device. The thread that releases the first stream enqueues both.
static void passed_on(size_t bytes) {
    unsigned char *from, *to, *pinned;
    CHECK(cudaMalloc(&from, bytes));
    CHECK(cudaMalloc(&to, bytes));
    CHECK(cudaMallocHost(&pinned, bytes));
    std::memset(pinned, 0, bytes);
    CHECK(cudaMemset(from, 9, bytes));
    cudaStream_t second;
    cudaEvent_t copied;
    CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming));
    {
        Standing standing;
        CHECK(cudaMemcpyAsync(pinned, from, bytes, cudaMemcpyDeviceToHost, standing.stream));
        CHECK(cudaEventRecord(copied, standing.stream));
        CHECK(cudaStreamWaitEvent(second, copied, 0));
        CHECK(cudaMemcpyAsync(to, pinned, bytes, cudaMemcpyHostToDevice, second));
        standing.release();
        CHECK(cudaStreamSynchronize(second));
    }
    std::memset(pinned, 0, bytes);
    CHECK(cudaMemcpy(pinned, to, bytes, cudaMemcpyDeviceToHost));
    EXPECT(pinned[0] == 9 && std::memcmp(pinned, pinned + 1, bytes - 1) == 0);
    CHECK(cudaStreamDestroy(second));
    CHECK(cudaEventDestroy(copied));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFree(from));
    CHECK(cudaFree(to));
    std::printf("memory that a copy fills: its thread proceeds\n");
}

int main() {
    many(70000, 300, "many small copies");
    many(80 << 20, 9, "a few large copies");
    rows();
    passed_on(40000);
    passed_on(20 << 20);
    return 0;
}

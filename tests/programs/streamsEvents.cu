// Streams, events and host callbacks: the order across streams, queries of unfinished work,
// priorities, the legacy default stream.
#include "check.h"

#include <atomic>
#include <thread>
#include <vector>

__global__ void set(int *values, int count, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = value;
}

__global__ void times_two_plus(const int *from, int *to, int count, int add) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i] * 2 + add;
}

const int COUNT = 5000, BLOCKS = (COUNT + 127) / 128;

static void expect_all(const int *device, int value) {
    std::vector<int> host(COUNT);
    CHECK(cudaMemcpy(host.data(), device, COUNT * sizeof(int), cudaMemcpyDeviceToHost));
    for (int found : host) EXPECT(found == value);
}

// A chain of kernels, each on another stream, ordered only by events.
static void chain() {
    const int links = 8;
    cudaStream_t streams[3];
    cudaEvent_t events[links];
    int *buffers[links + 1];
    for (cudaStream_t &stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int i = 0; i < links; i++) CHECK(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming));
    for (int *&buffer : buffers) CHECK(cudaMalloc(&buffer, COUNT * sizeof(int)));
    set<<<BLOCKS, 128, 0, streams[0]>>>(buffers[0], COUNT, 1);
    int expected = 1;
    for (int i = 0; i < links; i++) {
        CHECK(cudaEventRecord(events[i], streams[i % 3]));
        CHECK(cudaStreamWaitEvent(streams[(i + 1) % 3], events[i], 0));
        times_two_plus<<<BLOCKS, 128, 0, streams[(i + 1) % 3]>>>(buffers[i], buffers[i + 1], COUNT, i);
        expected = expected * 2 + i;
    }
    CHECK(cudaStreamSynchronize(streams[links % 3]));
    expect_all(buffers[links], expected);
    for (int *buffer : buffers) CHECK(cudaFree(buffer));
    for (cudaEvent_t event : events) CHECK(cudaEventDestroy(event));
    for (cudaStream_t stream : streams) CHECK(cudaStreamDestroy(stream));
    std::printf("streamsEvents: chain over three streams right\n");
}

struct Gate {
    std::atomic<bool> reached{false}, open{false};
    std::atomic<int> order{0};
    int seen[4] = {};
};

static void CUDART_CB wait_at_gate(void *data) {
    Gate *gate = static_cast<Gate *>(data);
    gate->reached = true;
    while (!gate->open) std::this_thread::yield();
    gate->seen[gate->order++] = 1;
}

static void CUDART_CB after_gate(void *data) {
    Gate *gate = static_cast<Gate *>(data);
    gate->seen[gate->order++] = 2;
}

static void CUDART_CB old_callback(cudaStream_t, cudaError_t status, void *data) {
    Gate *gate = static_cast<Gate *>(data);
    gate->seen[gate->order++] = status == cudaSuccess ? 3 : -1;
}

// A host function blocks a stream: later work of this stream stays unfinished, other streams
// continue.
static void callbacks() {
    Gate gate;
    cudaStream_t held, free_stream;
    cudaEvent_t before, behind, never;
    int *memory;
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&free_stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&before));
    CHECK(cudaEventCreateWithFlags(&behind, cudaEventBlockingSync));
    CHECK(cudaEventCreate(&never));
    CHECK(cudaMalloc(&memory, 2 * COUNT * sizeof(int)));
    CHECK(cudaEventQuery(never));  // an event that was never recorded counts as finished
    CHECK(cudaEventRecord(before, held));
    CHECK(cudaLaunchHostFunc(held, wait_at_gate, &gate));
    set<<<BLOCKS, 128, 0, held>>>(memory, COUNT, 5);
    CHECK(cudaLaunchHostFunc(held, after_gate, &gate));
    CHECK(cudaStreamAddCallback(held, old_callback, &gate, 0));
    CHECK(cudaEventRecord(behind, held));
    while (!gate.reached) std::this_thread::yield();
    SHOW(cudaEventQuery(before));
    SHOW(cudaEventQuery(behind));
    SHOW(cudaStreamQuery(held));
    float milliseconds = -1;
    SHOW(cudaEventElapsedTime(&milliseconds, before, behind));
    cudaGetLastError();  // "not ready" counts as an error until it is fetched
    set<<<BLOCKS, 128, 0, free_stream>>>(memory + COUNT, COUNT, 6);
    CHECK(cudaStreamSynchronize(free_stream));
    EXPECT(gate.order == 0);
    gate.open = true;
    CHECK(cudaEventSynchronize(behind));
    SHOW(cudaEventQuery(behind));
    SHOW(cudaStreamQuery(held));
    EXPECT(gate.order == 3 && gate.seen[0] == 1 && gate.seen[1] == 2 && gate.seen[2] == 3);
    CHECK(cudaEventElapsedTime(&milliseconds, before, behind));
    EXPECT(milliseconds >= 0.0f && milliseconds < 60000.0f);
    expect_all(memory, 5);
    expect_all(memory + COUNT, 6);
    CHECK(cudaFree(memory));
    CHECK(cudaEventDestroy(before));
    CHECK(cudaEventDestroy(behind));
    CHECK(cudaEventDestroy(never));
    CHECK(cudaStreamDestroy(held));
    CHECK(cudaStreamDestroy(free_stream));
    std::printf("streamsEvents: host callbacks in order\n");
}

// The legacy default stream waits for blocking streams, and they wait for it.
static void legacy() {
    cudaStream_t first, second;
    int *memory;
    CHECK(cudaStreamCreate(&first));
    CHECK(cudaStreamCreate(&second));
    CHECK(cudaMalloc(&memory, 3 * COUNT * sizeof(int)));
    set<<<BLOCKS, 128, 0, first>>>(memory, COUNT, 9);
    times_two_plus<<<BLOCKS, 128>>>(memory, memory + COUNT, COUNT, 1);
    times_two_plus<<<BLOCKS, 128, 0, second>>>(memory + COUNT, memory + 2 * COUNT, COUNT, 1);
    CHECK(cudaGetLastError());
    CHECK(cudaStreamSynchronize(second));
    expect_all(memory + 2 * COUNT, 39);
    CHECK(cudaFree(memory));
    CHECK(cudaStreamDestroy(first));
    CHECK(cudaStreamDestroy(second));
    std::printf("streamsEvents: legacy default stream in order\n");
}

static void properties() {
    int least = 1, greatest = 1, priority = 77;
    unsigned flags = 77;
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    EXPECT(greatest <= least);
    cudaStream_t urgent;
    CHECK(cudaStreamCreateWithPriority(&urgent, cudaStreamNonBlocking, greatest));
    CHECK(cudaStreamGetPriority(urgent, &priority));
    CHECK(cudaStreamGetFlags(urgent, &flags));
    EXPECT(priority == greatest);
    EXPECT(flags == cudaStreamNonBlocking);
    cudaEvent_t plain, timed;
    CHECK(cudaEventCreateWithFlags(&plain, cudaEventDisableTiming));
    CHECK(cudaEventCreate(&timed));
    CHECK(cudaEventRecord(plain, urgent));
    CHECK(cudaEventRecord(timed, urgent));
    CHECK(cudaStreamSynchronize(urgent));
    float milliseconds;
    SHOW(cudaEventElapsedTime(&milliseconds, plain, timed));
    cudaGetLastError();
    int *memory;
    CHECK(cudaMalloc(&memory, COUNT * sizeof(int)));
    set<<<BLOCKS, 128, 0, urgent>>>(memory, COUNT, 3);
    CHECK(cudaStreamDestroy(urgent));  // with work still in it: the work finishes all the same
    CHECK(cudaDeviceSynchronize());
    expect_all(memory, 3);
    CHECK(cudaFree(memory));
    CHECK(cudaEventDestroy(plain));
    CHECK(cudaEventDestroy(timed));
    std::printf("streamsEvents: priorities and flags right\n");
}

int main() {
    chain();
    callbacks();
    legacy();
    properties();
    return 0;
}

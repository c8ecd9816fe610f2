// Stream capture in one thread, in each mode, while another thread allocates, queries and exchanges
// its own mode: prints CUDA's codes. Then captures, instantiates and replays a graph undisturbed.
#include "check.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

__global__ void step(int *values, int count, int add) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = values[i] * 3 + add;
}

// Lets two threads take turns.
class Turns {
    std::mutex mutex;
    std::condition_variable changed;
    int turn = 0;

  public:
    void wait(int wanted) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return turn >= wanted; });
    }
    void reach(int value) {
        std::lock_guard<std::mutex> lock(mutex);
        turn = value;
        changed.notify_all();
    }
};

static const char *name(cudaStreamCaptureMode mode) {
    return mode == cudaStreamCaptureModeGlobal        ? "global"
           : mode == cudaStreamCaptureModeThreadLocal ? "thread-local"
                                                      : "relaxed";
}

const int COUNT = 1000;

static void show(const char *who, const char *what, cudaError_t status) {
    std::printf("  %s: %s -> %s\n", who, what, cudaGetErrorName(status));
    std::fflush(stdout);
    cudaGetLastError();
}

// Runs the calls of two threads during one capture. `unsafe` is the call of the other thread.
static void disturbed(cudaStreamCaptureMode mode, bool own_thread, bool relaxed_other) {
    std::printf("captureThreads: %s, %s\n", name(mode),
                own_thread      ? "the capturing thread allocates"
                : relaxed_other ? "another thread allocates in relaxed mode"
                                : "another thread allocates");
    cudaStream_t stream, elsewhere;
    cudaEvent_t event;
    int *memory;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&elsewhere, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaMalloc(&memory, COUNT * sizeof(int)));
    CHECK(cudaMemset(memory, 0, COUNT * sizeof(int)));
    CHECK(cudaEventRecord(event, elsewhere));
    CHECK(cudaDeviceSynchronize());

    auto unsafe = [&](const char *who) {
        void *extra = nullptr;
        show(who, "cudaMalloc", cudaMalloc(&extra, 4096));
        if (extra) show(who, "cudaFree", cudaFree(extra));
    };
    Turns turns;
    std::thread other([&] {
        turns.wait(1);
        if (!own_thread) {
            cudaStreamCaptureMode exchanged = cudaStreamCaptureModeRelaxed;
            if (relaxed_other) CHECK(cudaThreadExchangeStreamCaptureMode(&exchanged));
            cudaStreamCaptureStatus status;
            show("other", "cudaStreamIsCapturing", cudaStreamIsCapturing(elsewhere, &status));
            EXPECT(status == cudaStreamCaptureStatusNone);
            unsafe("other");
            if (relaxed_other) {
                CHECK(cudaThreadExchangeStreamCaptureMode(&exchanged));
                EXPECT(exchanged == cudaStreamCaptureModeRelaxed);
            }
        }
        turns.reach(2);
    });
    show("capturing", "cudaStreamBeginCapture", cudaStreamBeginCapture(stream, mode));
    step<<<8, 128, 0, stream>>>(memory, COUNT, 1);
    show("capturing", "launch", cudaGetLastError());
    turns.reach(1);
    turns.wait(2);
    if (own_thread) unsafe("capturing");
    step<<<8, 128, 0, stream>>>(memory, COUNT, 2);
    show("capturing", "second launch", cudaGetLastError());
    cudaGraph_t graph = nullptr;
    cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    show("capturing", "cudaStreamEndCapture", ended);
    other.join();
    EXPECT((ended == cudaSuccess) == (graph != nullptr));
    if (graph) {
        size_t nodes = 0;
        CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
        std::printf("  graph of %zu nodes\n", nodes);
        CHECK(cudaGraphDestroy(graph));
    }
    CHECK(cudaFree(memory));
    CHECK(cudaEventDestroy(event));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaStreamDestroy(elsewhere));
}

// Captures a fork to a second stream and its join, while another thread launches on its own stream.
static void replayed(cudaStreamCaptureMode mode) {
    cudaStream_t stream, side;
    cudaEvent_t fork, join;
    int *memory, *beside;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    CHECK(cudaMalloc(&memory, 2 * COUNT * sizeof(int)));
    CHECK(cudaMalloc(&beside, COUNT * sizeof(int)));
    CHECK(cudaMemset(memory, 0, 2 * COUNT * sizeof(int)));
    CHECK(cudaMemset(beside, 0, COUNT * sizeof(int)));
    CHECK(cudaDeviceSynchronize());

    Turns turns;
    std::thread other([&] {
        cudaStream_t own;
        CHECK(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
        turns.reach(1);
        turns.wait(2);
        for (int i = 0; i < 20; i++) step<<<8, 128, 0, own>>>(beside, COUNT, i);
        CHECK(cudaGetLastError());
        turns.reach(3);
        turns.wait(4);
        CHECK(cudaStreamSynchronize(own));
        CHECK(cudaStreamDestroy(own));
    });
    turns.wait(1);
    CHECK(cudaStreamBeginCapture(stream, mode));
    step<<<8, 128, 0, stream>>>(memory, COUNT, 1);
    turns.reach(2);
    turns.wait(3);
    CHECK(cudaEventRecord(fork, stream));
    CHECK(cudaStreamWaitEvent(side, fork, 0));
    step<<<8, 128, 0, side>>>(memory + COUNT, COUNT, 5);
    step<<<8, 128, 0, stream>>>(memory, COUNT, 2);
    CHECK(cudaEventRecord(join, side));
    CHECK(cudaStreamWaitEvent(stream, join, 0));
    CHECK(cudaMemcpyAsync(memory, memory + COUNT, sizeof(int), cudaMemcpyDeviceToDevice, stream));
    cudaStreamCaptureStatus status;
    CHECK(cudaStreamIsCapturing(side, &status));
    EXPECT(status == cudaStreamCaptureStatusActive);
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream, &graph));
    turns.reach(4);
    other.join();
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphDestroy(graph));

    std::vector<int> host(2 * COUNT);
    CHECK(cudaMemcpy(host.data(), memory, host.size() * sizeof(int), cudaMemcpyDeviceToHost));
    for (int value : host) EXPECT(value == 0);  // capturing executes nothing
    const int replays = 5;
    int first = 0, rest = 0, second = 0;
    for (int i = 0; i < replays; i++) {
        CHECK(cudaGraphLaunch(executable, stream));
        second = second * 3 + 5;
        rest = (rest * 3 + 1) * 3 + 2;
        first = second;
    }
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(host.data(), memory, host.size() * sizeof(int), cudaMemcpyDeviceToHost));
    EXPECT(host[0] == first);
    for (int i = 1; i < COUNT; i++) EXPECT(host[i] == rest);
    for (int i = COUNT; i < 2 * COUNT; i++) EXPECT(host[i] == second);
    unsigned eager = 0;
    for (int i = 0; i < 20; i++) eager = eager * 3 + i;
    CHECK(cudaMemcpy(host.data(), beside, COUNT * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < COUNT; i++) EXPECT(unsigned(host[i]) == eager);
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaFree(memory));
    CHECK(cudaFree(beside));
    CHECK(cudaEventDestroy(fork));
    CHECK(cudaEventDestroy(join));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaStreamDestroy(side));
    std::printf("captureThreads: %s, %d replays right\n", name(mode), replays);
    std::fflush(stdout);
}

int main() {
    CHECK(cudaFree(nullptr));
    // Loads the kernel before the first capture, like a program that runs a step before it captures
    // one.
    step<<<1, 1>>>(nullptr, 0, 0);
    CHECK(cudaDeviceSynchronize());
    const cudaStreamCaptureMode modes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                           cudaStreamCaptureModeRelaxed};
    for (cudaStreamCaptureMode mode : modes) {
        disturbed(mode, false, false);
        disturbed(mode, false, true);
        disturbed(mode, true, false);
        replayed(mode);
    }
    return 0;
}

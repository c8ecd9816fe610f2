// Calls that are allowed while a stream is captured: the code of each call and of the capture's
// end, in the three modes.
#include "check.h"

#include <functional>
#include <thread>

__global__ void store(int *at, int value) { *at = value; }

static cudaStream_t own, other, unrelated;

static void during(const char *what, cudaStreamCaptureMode mode, const std::function<cudaError_t()> &call) {
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamBeginCapture(own, mode));
    const cudaError_t code = call(), end = cudaStreamEndCapture(own, &graph);
    std::printf("captureRules: mode %d, %s: %d, end %d\n", static_cast<int>(mode), what, static_cast<int>(code), static_cast<int>(end));
    if (graph != nullptr) CHECK(cudaGraphDestroy(graph));
    cudaGetLastError();
}

int main() {
    int *memory, *pinned;
    char page[4096];
    CHECK(cudaMalloc(&memory, 4096));
    CHECK(cudaHostAlloc(&pinned, 4096, cudaHostAllocDefault));
    CHECK(cudaStreamCreate(&own));
    CHECK(cudaStreamCreate(&other));
    CHECK(cudaStreamCreate(&unrelated));
    cudaEvent_t event, captured;
    CHECK(cudaEventCreate(&event));
    CHECK(cudaEventCreate(&captured));
    store<<<1, 1, 0, other>>>(memory, 1);
    CHECK(cudaEventRecord(event, other));
    CHECK(cudaDeviceSynchronize());
    for (auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed}) {
        void *p = nullptr;
        during("event query", mode, [&] { return cudaEventQuery(event); });
        during("event synchronize", mode, [&] { return cudaEventSynchronize(event); });
        during("other stream synchronize", mode, [&] { return cudaStreamSynchronize(unrelated); });
        during("other stream query", mode, [&] { return cudaStreamQuery(unrelated); });
        during("own stream synchronize", mode, [&] { return cudaStreamSynchronize(own); });
        during("own stream query", mode, [&] { return cudaStreamQuery(own); });
        during("device synchronize", mode, [&] { return cudaDeviceSynchronize(); });
        during("set limit", mode, [&] { return cudaDeviceSetLimit(cudaLimitStackSize, 2048); });
        during("allocation", mode, [&] { return cudaMalloc(&p, 64); });
        during("pinned allocation", mode, [&] { return cudaHostAlloc(&p, 64, cudaHostAllocDefault); });
        during("registration", mode, [&] {
            const cudaError_t code = cudaHostRegister(page, sizeof page, cudaHostRegisterDefault);
            if (code == cudaSuccess) cudaHostUnregister(page);
            return code;
        });
        during("pool allocation elsewhere", mode, [&] { return cudaMallocAsync(&p, 64, unrelated); });
        during("synchronous copy", mode, [&] { return cudaMemcpy(memory, page, 64, cudaMemcpyHostToDevice); });
        during("synchronous copy back", mode, [&] { return cudaMemcpy(page, memory, 64, cudaMemcpyDeviceToHost); });
        during("synchronous fill", mode, [&] { return cudaMemset(memory, 0, 64); });
        during("copy in it", mode, [&] { return cudaMemcpyAsync(memory, pinned, 64, cudaMemcpyHostToDevice, own); });
        during("launch elsewhere", mode, [&] {
            store<<<1, 1, 0, unrelated>>>(memory, 2);
            return cudaPeekAtLastError();
        });
        during("launch in the legacy stream", mode, [&] {
            store<<<1, 1>>>(memory, 2);
            return cudaPeekAtLastError();
        });
        during("callback in it", mode, [&] {
            return cudaStreamAddCallback(own, [](cudaStream_t, cudaError_t, void *) {}, nullptr, 0);
        });
        during("wait for an event from outside", mode, [&] { return cudaStreamWaitEvent(own, event, 0); });
        during("query of a captured event", mode, [&] {
            cudaEventRecord(captured, own);
            return cudaEventQuery(captured);
        });
        during("fork that is not joined", mode, [&] {
            cudaEventRecord(captured, own);
            cudaStreamWaitEvent(other, captured, 0);
            store<<<1, 1, 0, other>>>(memory, 2);
            return cudaPeekAtLastError();
        });
        during("fork that is joined", mode, [&] {
            cudaEventRecord(captured, own);
            cudaStreamWaitEvent(other, captured, 0);
            store<<<1, 1, 0, other>>>(memory, 2);
            cudaEventRecord(captured, other);
            return cudaStreamWaitEvent(own, captured, 0);
        });
        during("question about the legacy stream", mode, [&] {
            cudaStreamCaptureStatus status;
            return cudaStreamIsCapturing(cudaStreamLegacy, &status);
        });
        during("second begin", mode, [&] { return cudaStreamBeginCapture(own, mode); });
        during("end in a stream that joined", mode, [&] {
            cudaGraph_t graph;
            cudaEventRecord(captured, own);
            cudaStreamWaitEvent(other, captured, 0);
            return cudaStreamEndCapture(other, &graph);
        });
        during("end in another thread", mode, [&] {
            cudaError_t code = cudaSuccess;
            std::thread([&] {
                cudaGraph_t graph;
                code = cudaStreamEndCapture(own, &graph);
            }).join();
            return code;
        });
    }
    // Calls that a host function may make.
    cudaError_t codes[4];
    CHECK(cudaLaunchHostFunc(
        own,
        [](void *data) {
            auto *codes = static_cast<cudaError_t *>(data);
            void *p;
            codes[0] = cudaMalloc(&p, 64);
            codes[1] = cudaDeviceSynchronize();
        },
        codes));
    CHECK(cudaStreamSynchronize(own));
    std::printf("captureRules: in a host function: %d %d\n", static_cast<int>(codes[0]), static_cast<int>(codes[1]));
    SHOW(cudaDeviceEnablePeerAccess(0, 0));
    void *nothing = &nothing;
    CHECK(cudaMallocHost(&nothing, 0));
    EXPECT(nothing == nullptr);
    return 0;
}

// Invalid calls and CUDA's codes for them. No call may have a lasting effect: at the end the device
// still works.
#include "check.h"

#include <cstdlib>

__global__ void set(int *values, int value) { values[threadIdx.x] = value; }

__global__ void with_shared(int *values) {
    extern __shared__ int shared[];
    shared[threadIdx.x] = int(threadIdx.x);
    __syncthreads();
    values[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

__constant__ int small_constant[4];

static void CUDART_CB nothing(void *) {}

// Prints the code of a call, and clears the last error.
#define WRONG(call)                                                                                                    \
    do {                                                                                                               \
        SHOW(call);                                                                                                    \
        cudaGetLastError();                                                                                            \
    } while (0)

#define WRONG_LAUNCH(kernel, grid, block, shared, ...)                                                                 \
    do {                                                                                                               \
        kernel<<<grid, block, shared>>>(__VA_ARGS__);                                                                  \
        std::printf("%s<<<%s, %s, %s>>> -> %s", #kernel, #grid, #block, #shared, cudaGetErrorName(cudaPeekAtLastError())); \
        std::printf(", fetched %s", cudaGetErrorName(cudaGetLastError()));                                             \
        std::printf(", then %s\n", cudaGetErrorName(cudaGetLastError()));                                              \
        std::fflush(stdout);                                                                                           \
    } while (0)

static void launches(int *memory) {
    WRONG_LAUNCH(set, 1, 0, 0, memory, 1);
    WRONG_LAUNCH(set, 0, 32, 0, memory, 1);
    WRONG_LAUNCH(set, 1, 2048, 0, memory, 1);
    WRONG_LAUNCH(set, 1, dim3(1, 1, 65), 0, memory, 1);
    WRONG_LAUNCH(set, dim3(1, 65536), 32, 0, memory, 1);
    WRONG_LAUNCH(set, dim3(1, 1, 65536), 32, 0, memory, 1);
    WRONG_LAUNCH(with_shared, 1, 32, 1 << 20, memory);
    WRONG(cudaFuncSetAttribute(with_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 20));
    WRONG(cudaLaunchKernel(reinterpret_cast<const void *>(&nothing), dim3(1), dim3(1), nullptr, 0, nullptr));
    cudaFuncAttributes attributes;
    WRONG(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(&nothing)));
}

static void memory_calls(int *memory) {
    int host[16] = {};
    char *registered = static_cast<char *>(std::aligned_alloc(4096, 8192));
    void *nowhere = nullptr;
    WRONG(cudaMalloc(static_cast<int **>(nullptr), 64));
    WRONG(cudaFree(host));
    WRONG(cudaFree(memory + 1));
    WRONG(cudaFreeHost(host));
    WRONG(cudaMemcpy(memory, host, sizeof host, static_cast<cudaMemcpyKind>(99)));
    WRONG(cudaMemcpy(nullptr, host, sizeof host, cudaMemcpyHostToDevice));
    WRONG(cudaMemcpy(host, nullptr, sizeof host, cudaMemcpyDeviceToHost));
    WRONG(cudaMemset(nullptr, 0, 16));
    WRONG(cudaMemset(memory, 0, size_t(1) << 40));
    WRONG(cudaMemcpy2D(memory, 4, host, 16, 8, 2, cudaMemcpyHostToDevice));
    WRONG(cudaMemcpyToSymbol(small_constant, host, sizeof host));
    WRONG(cudaHostGetDevicePointer(&nowhere, host, 0));
    WRONG(cudaHostUnregister(registered));
    CHECK(cudaHostRegister(registered, 8192, 0));
    WRONG(cudaHostRegister(registered, 8192, 0));
    CHECK(cudaHostUnregister(registered));
    std::free(registered);
    int *twice;
    CHECK(cudaMalloc(&twice, 4096));
    CHECK(cudaFree(twice));
    WRONG(cudaFree(twice));
    CHECK(cudaFree(nullptr));
}

static void handles() {
    cudaEvent_t never_first, never_second;
    cudaStream_t stream, no_stream;
    cudaEvent_t no_event;
    float milliseconds;
    cudaGraph_t graph = nullptr;
    CHECK(cudaEventCreate(&never_first));
    CHECK(cudaEventCreate(&never_second));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    WRONG(cudaEventRecord(nullptr, stream));
    WRONG(cudaEventSynchronize(nullptr));
    WRONG(cudaEventDestroy(nullptr));
    WRONG(cudaStreamWaitEvent(stream, nullptr, 0));
    WRONG(cudaStreamDestroy(nullptr));
    WRONG(cudaStreamCreateWithFlags(&no_stream, 1234));
    WRONG(cudaEventCreateWithFlags(&no_event, 0x4000));
    WRONG(cudaEventElapsedTime(&milliseconds, never_first, never_second));
    WRONG(cudaStreamEndCapture(stream, &graph));
    WRONG(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    WRONG(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    WRONG(cudaStreamSynchronize(stream));
    WRONG(cudaStreamEndCapture(stream, &graph));
    WRONG(cudaGraphLaunch(nullptr, stream));
    WRONG(cudaLaunchHostFunc(stream, nullptr, nullptr));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaEventDestroy(never_first));
    CHECK(cudaEventDestroy(never_second));
}

static void devices() {
    int value = 0;
    size_t limit = 0;
    cudaDeviceProp properties;
    WRONG(cudaSetDevice(99));
    WRONG(cudaSetDevice(-1));
    WRONG(cudaGetDeviceProperties(&properties, 99));
    WRONG(cudaDeviceGetAttribute(&value, static_cast<cudaDeviceAttr>(100000), 0));
    WRONG(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 99));
    WRONG(cudaDeviceGetLimit(&limit, static_cast<cudaLimit>(1000)));
    WRONG(cudaDeviceSetLimit(static_cast<cudaLimit>(1000), 1));
    WRONG(cudaDeviceCanAccessPeer(&value, 0, 99));
    WRONG(cudaDeviceEnablePeerAccess(0, 0));
    WRONG(cudaDeviceGetByPCIBusId(&value, "ffff:ff:1f.0"));
    std::printf("%s: %s\n", cudaGetErrorName(cudaErrorInvalidValue), cudaGetErrorString(cudaErrorInvalidValue));
    std::printf("%s: %s\n", cudaGetErrorName(static_cast<cudaError_t>(98765)),
                cudaGetErrorString(static_cast<cudaError_t>(98765)));
}

int main() {
    int *memory, host[64] = {};
    CHECK(cudaMalloc(&memory, sizeof host));
    launches(memory);
    memory_calls(memory);
    handles();
    devices();
    CHECK(cudaGetLastError());
    set<<<1, 64>>>(memory, 5);
    CHECK(cudaGetLastError());
    with_shared<<<1, 32, 32 * sizeof(int)>>>(memory);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(host, memory, sizeof host, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 64; i++) EXPECT(host[i] == (i < 32 ? 31 - i : 5));
    CHECK(cudaFree(memory));
    std::printf("errors: the device still works\n");
    return 0;
}

// Rarely used calls about devices: execution affinity, atomics between devices, notices, logs,
// the card's decompression.
#include "driver.h"

#include <string>

static void affinity() {
    DRIVER(cuDeviceGetExecAffinitySupport);
    DRIVER(cuCtxGetExecAffinity);
    int supported = 0;
    CUexecAffinityParam param = {};
    CHECK_DRIVER(cuDeviceGetExecAffinitySupport_(&supported, CU_EXEC_AFFINITY_TYPE_SM_COUNT, 0));
    // An H100 without MPS reports no support, and yet returns something else than
    // CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY.
    if (supported) CHECK_DRIVER(cuCtxGetExecAffinity_(&param, CU_EXEC_AFFINITY_TYPE_SM_COUNT));
    std::printf("deviceCalls: affinity right\n");
}

static void CUDART_CB never(CUasyncNotificationInfo *, void *, CUasyncCallbackHandle) { std::exit(7); }

// Few systems send notices; a driver may refuse the function.
static void notices() {
    DRIVER(cuDeviceRegisterAsyncNotification);
    DRIVER(cuDeviceUnregisterAsyncNotification);
    CUasyncCallbackHandle one = nullptr, other = nullptr;
    if (cuDeviceRegisterAsyncNotification_(0, never, nullptr, &one) == CUDA_SUCCESS) {
        CHECK_DRIVER(cuDeviceRegisterAsyncNotification_(0, never, &one, &other));
        EXPECT(one && other && one != other);
        EXPECT(cuDeviceRegisterAsyncNotification_(1000, never, nullptr, &one) != CUDA_SUCCESS);
        CHECK_DRIVER(cuDeviceUnregisterAsyncNotification_(0, other));
        CHECK_DRIVER(cuDeviceUnregisterAsyncNotification_(0, one));
    }
    std::printf("deviceCalls: notices right\n");
}

#if CUDA_VERSION >= 13000

static void CUDART_CB message(void *, CUlogLevel, char *, size_t) {}

// No message comes between the iterator and the reading.
static void logs() {
    DRIVER(cuLogsRegisterCallback);
    DRIVER(cuLogsUnregisterCallback);
    DRIVER(cuLogsCurrent);
    DRIVER(cuLogsDumpToMemory);
    CUlogsCallbackHandle callback = nullptr;
    CUlogIterator iterator = 0;
    char text[4096];
    size_t size = sizeof text;
    CHECK_DRIVER(cuLogsRegisterCallback_(message, nullptr, &callback));
    CHECK_DRIVER(cuLogsCurrent_(&iterator, 0));
    CHECK_DRIVER(cuLogsDumpToMemory_(&iterator, text, &size, 0));
    EXPECT(size == 0);
    CHECK_DRIVER(cuLogsUnregisterCallback_(callback));
    std::printf("deviceCalls: logs right\n");
}

static void atomics() {
    DRIVER(cuDeviceGetP2PAtomicCapabilities);
    DRIVER(cuDeviceGetP2PAttribute);
    const CUatomicOperation operations[] = {CU_ATOMIC_OPERATION_INTEGER_ADD, CU_ATOMIC_OPERATION_CAS};
    unsigned capabilities[3] = {99, 99, 99};
    int devices = 0;
    CHECK(cudaGetDeviceCount(&devices));
    EXPECT(cuDeviceGetP2PAtomicCapabilities_(capabilities, operations, 2, 0, 0) == CUDA_ERROR_INVALID_DEVICE);
    if (devices > 1) {
        int native = 0;
        CHECK_DRIVER(cuDeviceGetP2PAtomicCapabilities_(capabilities, operations, 2, 0, 1));
        CHECK_DRIVER(cuDeviceGetP2PAttribute_(&native, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, 0, 1));
        std::printf("deviceCalls: atomics %x %x\n", capabilities[0], capabilities[1]);
        EXPECT(cuDeviceGetP2PAtomicCapabilities_(capabilities, operations, 0, 0, 1) != CUDA_SUCCESS);
    }
    EXPECT(capabilities[2] == 99);
    DRIVER(cuDeviceGetHostAtomicCapabilities);
    SHOW_DRIVER(cuDeviceGetHostAtomicCapabilities_(capabilities, operations, 0, 0));
    SHOW_DRIVER(cuDeviceGetHostAtomicCapabilities_(capabilities, operations, 2, 99));
    SHOW_DRIVER(cuDeviceGetHostAtomicCapabilities_(capabilities, operations, 2, 0));
    EXPECT(capabilities[2] == 99);
    std::printf("deviceCalls: atomics right\n");
}

// Cards before Blackwell have no such engine, and the call fails.
static void decompression(cudaStream_t stream) {
    DRIVER(cuMemBatchDecompressAsync);
    int algorithms = 0;
    CHECK(cudaDeviceGetAttribute(&algorithms, cudaDeviceAttr(CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK), 0));
    char *device;
    CHECK(cudaMalloc(&device, 4096));
    // One block of LZ4: eight literals.
    const char packed[] = {char(0x80), 'l', 'i', 't', 'e', 'r', 'a', 'l', 's'};
    CHECK(cudaMemcpy(device, packed, sizeof packed, cudaMemcpyHostToDevice));
    CUmemDecompressParams params = {};
    params.srcNumBytes = sizeof packed;
    params.dstNumBytes = 8;
    params.dstActBytes = reinterpret_cast<cuuint32_t *>(device + 2048);
    params.src = device;
    params.dst = device + 1024;
    params.algo = CU_MEM_DECOMPRESS_ALGORITHM_LZ4;
    size_t wrong = 99;
    CUresult done = cuMemBatchDecompressAsync_(&params, 1, 0, &wrong, stream);
    if (algorithms & CU_MEM_DECOMPRESS_ALGORITHM_LZ4) {
        char text[8];
        cuuint32_t length = 0;
        CHECK_DRIVER(done);
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaMemcpy(text, device + 1024, sizeof text, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(&length, device + 2048, sizeof length, cudaMemcpyDeviceToHost));
        EXPECT(length == 8 && std::string(text, 8) == "literals");
    } else {
        EXPECT(done != CUDA_SUCCESS);
    }
    CHECK(cudaFree(device));
    std::printf("deviceCalls: decompression right\n");
}

#endif

int main() {
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    affinity();
    notices();
#if CUDA_VERSION >= 13000
    logs();
    atomics();
    decompression(stream);
#endif
    CHECK(cudaStreamDestroy(stream));
    return 0;
}

// Resetting a device or destroying a context frees its memory and ends its limits. Afterwards
// copies of all sizes, default streams and events work again.
#include "driver.h"

#include <cstring>

__global__ void fill(int *values, int count, int value) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) values[i] = value + i;
}

const int COUNT = 5 << 20;
const size_t BYTES = COUNT * sizeof(int);

static void work(int first) {
    int *device, *pinned;
    CHECK(cudaMalloc(&device, BYTES));
    CHECK(cudaHostAlloc(&pinned, BYTES, cudaHostAllocDefault));
    cudaStream_t stream;
    cudaEvent_t event;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&event));
    for (const cudaStream_t on : {stream, cudaStream_t(nullptr), cudaStreamPerThread}) {
        for (const size_t bytes : {BYTES, size_t(4)}) {
            fill<<<64, 256, 0, on>>>(device, COUNT, first);
            std::memset(pinned, 0, bytes);
            CHECK(cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, on));
            CHECK(cudaEventRecord(event, on));
            CHECK(cudaEventSynchronize(event));
            for (size_t i = 0; i < bytes / sizeof(int); i++) EXPECT(pinned[i] == first + int(i));
            CHECK(cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyHostToDevice, on));
            CHECK(cudaMemcpy(pinned, device, bytes, cudaMemcpyDeviceToHost));
            EXPECT(pinned[bytes / sizeof(int) - 1] == first + int(bytes / sizeof(int)) - 1);
        }
    }
    // Work is still in flight, and no memory is freed, when the context is destroyed.
    CHECK(cudaMemcpyAsync(pinned, device, BYTES, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaMemcpyAsync(pinned, device, 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaMemcpyAsync(device, pinned, BYTES, cudaMemcpyHostToDevice, stream));
}

int main() {
    size_t free, total;
    // More than the device has, unless each round frees its memory.
    const int rounds = 4;
    size_t stack, now;
    CHECK(cudaDeviceGetLimit(&stack, cudaLimitStackSize));
    for (int round = 0; round < rounds; round++) {
        void *third;
        CHECK(cudaMemGetInfo(&free, &total));
        CHECK(cudaMalloc(&third, total / 3));
        CHECK(cudaDeviceSetLimit(cudaLimitStackSize, 2 * stack));
        CHECK(cudaDeviceGetLimit(&now, cudaLimitStackSize));
        EXPECT(now >= 2 * stack);
        work(round * 100);
        CHECK(cudaDeviceReset());
        CHECK(cudaDeviceGetLimit(&now, cudaLimitStackSize));
        EXPECT(now == stack);
    }
    std::printf("deviceReset: reset right\n");

    DRIVER(cuCtxDestroy);
    DRIVER(cuMemAlloc);
    DRIVER(cuMemcpyHtoD);
    DRIVER(cuMemcpyDtoH);
    typedef CUresult (*ContextCreate)(CUcontext *, unsigned, CUdevice);
    const auto create = reinterpret_cast<ContextCreate>(driver_symbol("cuCtxCreate_v2"));
    for (int round = 0; round < rounds; round++) {
        CUcontext context;
        CUdeviceptr memory, small, third;
        CHECK_DRIVER(create(&context, 0, 0));
        CHECK_DRIVER(cuMemAlloc_(&memory, BYTES));
        CHECK_DRIVER(cuMemAlloc_(&small, 100));
        CHECK_DRIVER(cuMemAlloc_(&third, total / 3));
        int *host = static_cast<int *>(std::malloc(BYTES));
        std::memset(host, round, BYTES);
        CHECK_DRIVER(cuMemcpyHtoD_(memory, host, BYTES));
        std::memset(host, 0xff, BYTES);
        CHECK_DRIVER(cuMemcpyDtoH_(host, memory, BYTES));
        EXPECT(reinterpret_cast<char *>(host)[BYTES - 1] == round);
        std::free(host);
        CHECK_DRIVER(cuCtxDestroy_(context));
    }
    CHECK(cudaSetDevice(0));
    work(7);
    CHECK(cudaDeviceSynchronize());
    std::printf("deviceReset: contexts right\n");
    return 0;
}

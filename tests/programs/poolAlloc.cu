// Stream-ordered allocation: from the default pool and from an own pool, reuse in stream order, use
// on another stream, trimming.
#include "driver.h"

#include <vector>

__global__ void fill(int *values, int count, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = value + i;
}

const int COUNT = 200000, BLOCKS = (COUNT + 255) / 256;

static void expect(const int *device, int value, cudaStream_t stream) {
    std::vector<int> host(COUNT);
    CHECK(cudaMemcpyAsync(host.data(), device, COUNT * sizeof(int), cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < COUNT; i++) EXPECT(host[i] == value + i);
}

// Expects that the driver names a pool as the origin of memory.
static void expect_pool(const void *memory, cudaMemPool_t pool) {
    DRIVER(cuPointerGetAttribute);
    CUmemoryPool found = nullptr;
    CHECK_DRIVER(cuPointerGetAttribute_(&found, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, (CUdeviceptr)memory));
    EXPECT(found == pool);
}

int main() {
    int supported = 0;
    CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, 0));
    EXPECT(supported == 1);
    cudaStream_t stream, other;
    cudaEvent_t event;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    const size_t bytes = COUNT * sizeof(int);

    for (int round = 0; round < 20; round++) {
        int *first, *second;
        CHECK(cudaMallocAsync(&first, bytes, stream));
        CHECK(cudaMallocAsync(&second, bytes + round * 1000, stream));
        EXPECT(first != second);
        fill<<<BLOCKS, 256, 0, stream>>>(first, COUNT, round);
        fill<<<BLOCKS, 256, 0, stream>>>(second, COUNT, round + 1000);
        CHECK(cudaGetLastError());
        if (round % 5 == 0) {
            expect(first, round, stream);
            expect(second, round + 1000, stream);
        }
        CHECK(cudaFreeAsync(first, stream));
        CHECK(cudaFreeAsync(second, stream));
    }
    CHECK(cudaStreamSynchronize(stream));
    std::printf("poolAlloc: allocations in stream order right\n");

    // Used and freed on another stream, which waits for the first stream.
    int *shared;
    CHECK(cudaMallocAsync(&shared, bytes, stream));
    fill<<<BLOCKS, 256, 0, stream>>>(shared, COUNT, 77);
    CHECK(cudaEventRecord(event, stream));
    CHECK(cudaStreamWaitEvent(other, event, 0));
    expect(shared, 77, other);
    CHECK(cudaFreeAsync(shared, other));
    CHECK(cudaStreamSynchronize(other));
    std::printf("poolAlloc: use on another stream right\n");

    cudaMemPool_t pool, current;
    CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
    CHECK(cudaDeviceGetMemPool(&current, 0));
    EXPECT(pool == current);
    unsigned long long threshold = 64u << 20, found = 0;
    CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &found));
    // Attributes of type int write no more than an int.
    int reuse[3] = {0, 5, 6};
    CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowOpportunistic, reuse));
    reuse[0] = 4;
    CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolReuseAllowOpportunistic, reuse));
    EXPECT(reuse[0] == 0 && reuse[1] == 5 && reuse[2] == 6);
    reuse[0] = 1;
    CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowOpportunistic, reuse));
    EXPECT(found == threshold);
    CHECK(cudaMallocAsync(&shared, bytes, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &found));
    EXPECT(found >= bytes);
    expect_pool(shared, pool);
    CHECK(cudaFree(shared));  // the ordinary call frees it as well
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemPoolTrimTo(pool, 0));
    std::printf("poolAlloc: attributes of the default pool right\n");

    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = 0;
    CHECK(cudaMemPoolCreate(&pool, &properties));
    CHECK(cudaMallocFromPoolAsync(&shared, bytes, pool, stream));
    expect_pool(shared, pool);
    fill<<<BLOCKS, 256, 0, stream>>>(shared, COUNT, 5);
    expect(shared, 5, stream);
    CHECK(cudaFreeAsync(shared, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemPoolDestroy(pool));
    CHECK(cudaEventDestroy(event));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaStreamDestroy(other));
    std::printf("poolAlloc: a pool of its own right\n");
    return 0;
}

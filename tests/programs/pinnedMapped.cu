// Host memory that kernels read and write in place: allocated mapped, registered mapped, and
// write-combined.
#include "check.h"

#include <cstdlib>

__global__ void add_into(const int *from, int *to, int count, int add) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i] + add;
}

__global__ void add_behind(int *const *from, int count, int add) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) (*from)[i] += add;
}

__global__ void wait_for(const volatile int *flag, int wanted) {
    while (*flag != wanted) {}
}

const int COUNT = 50000, BLOCKS = (COUNT + 255) / 256;

static void rounds(int *host, int *device, const char *what) {
    int *scratch, back[8];
    CHECK(cudaMalloc(&scratch, COUNT * sizeof(int)));
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < COUNT; i++) host[i] = i * 2 + round;
        add_into<<<BLOCKS, 256>>>(device, scratch, COUNT, 1);  // the kernel reads host memory
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(back, scratch + COUNT - 8, sizeof back, cudaMemcpyDeviceToHost));
        for (int i = 0; i < 8; i++) EXPECT(back[i] == (COUNT - 8 + i) * 2 + round + 1);
        add_into<<<BLOCKS, 256>>>(scratch, device, COUNT, 10);  // the kernel writes host memory
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < COUNT; i++) EXPECT(host[i] == i * 2 + round + 11);
    }
    // The host changes the memory between two kernels of one stream, synchronized by events.
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (int round = 0; round < 4; round++) {
        host[0] = round;
        add_into<<<1, 1>>>(device, device + 1, 1, 100);
        CHECK(cudaEventRecord(event));
        CHECK(cudaEventSynchronize(event));
        EXPECT(host[1] == round + 100);
    }
    // Kernels wait for what the host writes after their launch, in calls that then wait for them.
    for (int way = 0; way < 4; way++) {
        host[2] = 0;
        wait_for<<<1, 1>>>(device + 2, 1);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(event));
        host[2] = 1;
        if (way == 0) CHECK(cudaDeviceSynchronize());
        if (way == 1) CHECK(cudaStreamSynchronize(nullptr));
        if (way == 2) CHECK(cudaEventSynchronize(event));
        while (way == 3 && cudaStreamQuery(nullptr) == cudaErrorNotReady) {}
        CHECK(cudaStreamQuery(nullptr));
    }
    CHECK(cudaEventDestroy(event));
    CHECK(cudaFree(scratch));
    std::printf("pinnedMapped: %s memory right\n", what);
}

int main() {
    const size_t bytes = COUNT * sizeof(int);
    int *host, *device;
    unsigned flags = 0;
    CHECK(cudaHostAlloc(&host, bytes, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&device, host, 0));
    CHECK(cudaHostGetFlags(&flags, host));
    EXPECT(flags & cudaHostAllocMapped);
    rounds(host, device, "mapped");
    // With unified addressing the host's own address serves as well.
    rounds(host, host, "mapped, by its host address,");
    CHECK(cudaFreeHost(host));

    host = static_cast<int *>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
    EXPECT(host != nullptr);
    CHECK(cudaHostRegister(host, bytes, cudaHostRegisterMapped));
    CHECK(cudaHostGetDevicePointer(&device, host, 0));
    rounds(host, device, "registered");
    CHECK(cudaHostUnregister(host));
    std::free(host);

    CHECK(cudaHostAlloc(&host, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
    CHECK(cudaHostGetDevicePointer(&device, host, 0));
    rounds(host, device, "portable");
    CHECK(cudaFreeHost(host));

    // Only the allocation's call names this memory; the kernel reads its address from device
    // memory.
    int **address;
    CHECK(cudaHostAlloc(&host, bytes, cudaHostAllocMapped));
    CHECK(cudaMalloc(&address, sizeof host));
    CHECK(cudaMemcpy(address, &host, sizeof host, cudaMemcpyHostToDevice));
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < COUNT; i++) host[i] = i + round;
        add_behind<<<BLOCKS, 256>>>(address, COUNT, 5);
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < COUNT; i++) EXPECT(host[i] == i + round + 5);
    }
    CHECK(cudaFree(address));
    CHECK(cudaFreeHost(host));
    std::printf("pinnedMapped: memory that device memory points to right\n");

    // Pinned memory is accessible without that flag, too.
    CHECK(cudaHostAlloc(&host, bytes, cudaHostAllocDefault));
    CHECK(cudaMalloc(&address, 4 * sizeof host));
    int *const addresses[] = {nullptr, nullptr, host, nullptr};
    CHECK(cudaMemcpy(address, addresses, sizeof addresses, cudaMemcpyHostToDevice));
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < COUNT; i++) host[i] = i + round;
        add_behind<<<BLOCKS, 256>>>(address + 2, COUNT, 5);
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < COUNT; i++) EXPECT(host[i] == i + round + 5);
    }
    CHECK(cudaFree(address));
    CHECK(cudaFreeHost(host));
    std::printf("pinnedMapped: memory that a table points to right\n");
    return 0;
}

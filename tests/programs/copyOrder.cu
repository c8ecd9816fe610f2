// Large copies to pinned memory are complete after each way to synchronize through an event: a
// stream that waited for it, a stream that waited for an event of that stream, the default stream,
// an event of the default stream, and the event itself. Copies of any size are complete for a host
// function after them.
#include "check.h"

__global__ void fill(int *values, int count, int value) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) values[i] = value + i;
}

__global__ void nothing() {}

struct Copied {
    const int *values;
    int count, first, right;
};

void look(void *data) {
    Copied *copied = static_cast<Copied *>(data);
    copied->right = 1;
    for (int i = copied->count - 1; i >= 0; i--) copied->right &= copied->values[i] == copied->first + i;
}

int main() {
    const int count = 6 << 20;
    const size_t bytes = count * sizeof(int);
    int *device, *host;
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaHostAlloc(&host, bytes, cudaHostAllocDefault));
    cudaStream_t copies, waiting, last;
    CHECK(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&waiting, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&last, cudaStreamNonBlocking));
    cudaStream_t blocking;
    CHECK(cudaStreamCreate(&blocking));
    cudaEvent_t event, second;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&second, cudaEventDisableTiming));
    for (int round = 0; round < 6; round++) {
        const cudaStream_t stream = round >= 4 ? blocking : copies;
        fill<<<64, 256, 0, stream>>>(device, count, round * 1000);
        CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaEventRecord(event, stream));
        switch (round) {
        case 0:
            CHECK(cudaEventSynchronize(event));
            break;
        case 1:
            CHECK(cudaStreamWaitEvent(waiting, event, 0));
            nothing<<<1, 1, 0, waiting>>>();
            CHECK(cudaStreamSynchronize(waiting));
            break;
        case 2:
            CHECK(cudaStreamWaitEvent(waiting, event, 0));
            CHECK(cudaEventRecord(second, waiting));
            CHECK(cudaStreamWaitEvent(last, second, 0));
            nothing<<<1, 1, 0, last>>>();
            CHECK(cudaStreamSynchronize(last));
            break;
        case 3:
            CHECK(cudaStreamWaitEvent(waiting, event, 0));
            CHECK(cudaEventRecord(second, waiting));
            CHECK(cudaEventSynchronize(second));
            break;
        case 4:
            nothing<<<1, 1>>>();
            CHECK(cudaStreamSynchronize(nullptr));
            break;
        case 5:
            CHECK(cudaEventRecord(event, nullptr));
            CHECK(cudaEventSynchronize(event));
            break;
        }
        // Checks from the end, which arrives last.
        for (int i = count - 1; i >= 0; i--) EXPECT(host[i] == round * 1000 + i);
        CHECK(cudaDeviceSynchronize());
    }
    for (int length : {count, 16, 1000, 1}) {
        Copied copied = {host, length, length * 3, -1};
        fill<<<64, 256, 0, copies>>>(device, length, copied.first);
        CHECK(cudaMemcpyAsync(host, device, length * sizeof(int), cudaMemcpyDeviceToHost, copies));
        CHECK(cudaLaunchHostFunc(copies, look, &copied));
        CHECK(cudaStreamSynchronize(copies));
        EXPECT(copied.right == 1);
    }
    std::printf("copyOrder: right\n");
    CHECK(cudaFreeHost(host));
    CHECK(cudaFree(device));
    return 0;
}

// Copies from pinned memory read it when their stream gets there, whatever fills it first: another stream's copy, a host function, one in a
// graph, a kernel that has it mapped. Copies to memory that a kernel has mapped are there for the next kernel; copies of managed memory wait
// for the kernel that writes it; copies within the host wait for those that fill their source.
#include "check.h"

#include <cstring>

__global__ void fill(int *values, int count, int value) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) values[i] = value + i;
}

__global__ void add(int *values, int count, int value) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) values[i] += value;
}

struct Work {
    int *values;
    int count, first;
};

static void write(void *data) {
    const Work *work = static_cast<const Work *>(data);
    for (int i = 0; i < work->count; i++) work->values[i] = work->first + i;
}

static void expect(const int *values, int count, int first) {
    for (int i = count - 1; i >= 0; i--) EXPECT(values[i] == first + i);
}

int main() {
    const int most = 6 << 20;
    const size_t bytes = most * sizeof(int);
    int *from, *to, *host, *back, *second;
    CHECK(cudaMalloc(&from, bytes));
    CHECK(cudaMalloc(&to, bytes));
    for (int **pinned : {&host, &back, &second}) CHECK(cudaHostAlloc(pinned, bytes, cudaHostAllocDefault));
    cudaStream_t one, two;
    CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking));
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    int first = 0;
    for (int count : {most, 100000, 1000, 1}) {
        const size_t length = count * sizeof(int);
        const auto result = [&](cudaStream_t stream) {
            std::memset(back, 0xff, length);
            CHECK(cudaMemcpyAsync(back, to, length, cudaMemcpyDeviceToHost, stream));
            CHECK(cudaStreamSynchronize(stream));
            expect(back, count, first);
        };
        // Another stream's copy, by an event.
        first += 1000;
        std::memset(host, 0xff, length);
        fill<<<64, 256, 0, one>>>(from, count, first);
        CHECK(cudaMemcpyAsync(host, from, length, cudaMemcpyDeviceToHost, one));
        CHECK(cudaEventRecord(event, one));
        CHECK(cudaStreamWaitEvent(two, event, 0));
        CHECK(cudaMemcpyAsync(to, host, length, cudaMemcpyHostToDevice, two));
        result(two);
        // The same in rows.
        first += 1000;
        fill<<<64, 256, 0, one>>>(from, count, first);
        CHECK(cudaMemcpyAsync(host, from, length, cudaMemcpyDeviceToHost, one));
        CHECK(cudaMemcpy2DAsync(to, length, host, length, length, 1, cudaMemcpyHostToDevice, one));
        result(one);
        // Within the host.
        first += 1000;
        fill<<<64, 256, 0, one>>>(from, count, first);
        CHECK(cudaMemcpyAsync(host, from, length, cudaMemcpyDeviceToHost, one));
        CHECK(cudaMemcpyAsync(second, host, length, cudaMemcpyHostToHost, one));
        CHECK(cudaStreamSynchronize(one));
        expect(second, count, first);
        // A host function, twice: what the first copy reads is not the second one's.
        Work work[2] = {{host, count, first + 1000}, {host, count, first + 2000}};
        CHECK(cudaLaunchHostFunc(one, write, &work[0]));
        CHECK(cudaMemcpyAsync(from, host, length, cudaMemcpyHostToDevice, one));
        CHECK(cudaLaunchHostFunc(one, write, &work[1]));
        CHECK(cudaMemcpyAsync(to, host, length, cudaMemcpyHostToDevice, one));
        first += 2000;
        result(one);
        CHECK(cudaMemcpy(second, from, length, cudaMemcpyDeviceToHost));
        expect(second, count, first - 1000);
        // A host function of a graph, and a copy behind the graph.
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        first += 1000;
        work[0].first = first;
        CHECK(cudaStreamBeginCapture(one, cudaStreamCaptureModeThreadLocal));
        CHECK(cudaLaunchHostFunc(one, write, &work[0]));
        CHECK(cudaStreamEndCapture(one, &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK(cudaGraphLaunch(exec, one));
        CHECK(cudaMemcpyAsync(to, host, length, cudaMemcpyHostToDevice, one));
        result(one);
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
    }
    std::printf("hostOrder: pinned memory right\n");

    const int count = 100000;
    const size_t length = count * sizeof(int);
    int *mapped, *seen;
    CHECK(cudaHostAlloc(&mapped, length, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&seen, mapped, 0));
    fill<<<64, 256, 0, one>>>(seen, count, 5);
    CHECK(cudaMemcpyAsync(to, mapped, length, cudaMemcpyHostToDevice, one));
    CHECK(cudaMemcpyAsync(back, to, length, cudaMemcpyDeviceToHost, one));
    CHECK(cudaStreamSynchronize(one));
    expect(back, count, 5);
    expect(mapped, count, 5);
    fill<<<64, 256, 0, one>>>(from, count, 70);
    CHECK(cudaMemcpyAsync(mapped, from, length, cudaMemcpyDeviceToHost, one));
    add<<<64, 256, 0, one>>>(seen, count, 7);
    CHECK(cudaStreamSynchronize(one));
    expect(mapped, count, 77);
    std::printf("hostOrder: mapped memory right\n");

    int *managed;
    CHECK(cudaMallocManaged(&managed, length));
    fill<<<64, 256>>>(managed, count, 9);
    CHECK(cudaMemcpy(to, managed, length, cudaMemcpyDefault));
    CHECK(cudaMemcpy(back, to, length, cudaMemcpyDeviceToHost));
    expect(back, count, 9);
    fill<<<64, 256>>>(managed, count, 11);
    CHECK(cudaMemcpy(back, managed, length, cudaMemcpyDefault));
    expect(back, count, 11);
    fill<<<64, 256>>>(to, count, 13);
    CHECK(cudaMemcpy(managed, to, length, cudaMemcpyDefault));
    add<<<64, 256>>>(managed, count, 2);
    CHECK(cudaDeviceSynchronize());
    expect(managed, count, 15);
    std::printf("hostOrder: managed memory right\n");
    return 0;
}

// Host memory in graphs: captured copies from and to pinned, registered and pageable memory, and of
// a plane. A host function between copies reads the result of one and writes the source of another.
// A node gets another buffer. Replays use the content at that time.
#include "check.h"

#include <cstdlib>
#include <cstring>
#include <vector>

__global__ void scale(int *values, int count, int factor, int add) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = values[i] * factor + add;
}

const int COUNT = 5000;
const size_t BYTES = COUNT * sizeof(int);

static void round_trips(int *from, int *to, const char *what) {
    int *work;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaMalloc(&work, BYTES));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaMemcpyAsync(work, from, BYTES, cudaMemcpyHostToDevice, stream));
    scale<<<(COUNT + 127) / 128, 128, 0, stream>>>(work, COUNT, 3, 1);
    CHECK(cudaMemcpyAsync(to, work, BYTES, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    size_t nodes = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    EXPECT(nodes == 3);
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < COUNT; i++) from[i] = i + round;
        if (to != from) std::memset(to, 0, BYTES);
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (int i = 0; i < COUNT; i++) EXPECT(to[i] == (i + round) * 3 + 1);
    }
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(work));
    std::printf("graphHost: %s right\n", what);
}

struct Middle {
    int *result, *next;
};

static void CUDART_CB make_next(void *data) {
    auto *middle = static_cast<Middle *>(data);
    for (int i = 0; i < COUNT; i++) middle->next[i] = middle->result[i] + 1000;
}

int main() {
    int *a, *b, *c;
    CHECK(cudaHostAlloc(&a, BYTES, cudaHostAllocDefault));
    CHECK(cudaHostAlloc(&b, BYTES, cudaHostAllocDefault));
    CHECK(cudaHostAlloc(&c, BYTES, cudaHostAllocDefault));
    round_trips(a, b, "pinned");
    {
        std::vector<int> from(COUNT), to(COUNT);
        round_trips(from.data(), to.data(), "pageable");
        round_trips(from.data(), from.data(), "pageable in place");
    }
    auto *registered = static_cast<int *>(std::aligned_alloc(4096, 2 * 20480));
    CHECK(cudaHostRegister(registered, 2 * 20480, cudaHostRegisterDefault));
    round_trips(registered + 3, registered + 5120 + 7, "registered");
    CHECK(cudaHostUnregister(registered));
    std::free(registered);

    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    int *work;
    CHECK(cudaMalloc(&work, 2 * BYTES));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    // Copies a plane of pinned memory to the device, and another one back.
    const size_t width = 40, pitch = 64, rows = 50;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    CHECK(cudaMemcpy2DAsync(work, 128, reinterpret_cast<char *>(a) + 8, pitch, width, rows, cudaMemcpyHostToDevice, stream));
    CHECK(cudaMemcpy2DAsync(reinterpret_cast<char *>(b) + 4, pitch, work, 128, width, rows, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < COUNT; i++) a[i] = 7 * i;
    std::memset(b, 0, BYTES);
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    auto *source = reinterpret_cast<unsigned char *>(a) + 8, *target = reinterpret_cast<unsigned char *>(b) + 4;
    for (size_t y = 0; y < rows; y++)
        for (size_t x = 0; x < pitch; x++) EXPECT(target[y * pitch + x] == (x < width ? source[y * pitch + x] : 0));
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphHost: plane right\n");

    // a -> work -> b, host function: b + 1000 -> a, a -> work -> c; then the first copy gets
    // another source.
    Middle middle = {b, a};
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t in, out, host, again, last;
    CHECK(cudaGraphAddMemcpyNode1D(&in, graph, nullptr, 0, work, a, BYTES, cudaMemcpyHostToDevice));
    CHECK(cudaGraphAddMemcpyNode1D(&out, graph, &in, 1, b, work, BYTES, cudaMemcpyDeviceToHost));
    cudaHostNodeParams parameters = {make_next, &middle};
    CHECK(cudaGraphAddHostNode(&host, graph, &out, 1, &parameters));
    CHECK(cudaGraphAddMemcpyNode1D(&again, graph, &host, 1, work, a, BYTES, cudaMemcpyHostToDevice));
    CHECK(cudaGraphAddMemcpyNode1D(&last, graph, &again, 1, c, work, BYTES, cudaMemcpyDeviceToHost));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < COUNT; i++) a[i] = i;
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < COUNT; i++) EXPECT(b[i] == i && c[i] == i + 1000);
    std::vector<int> other(COUNT);
    for (int i = 0; i < COUNT; i++) other[i] = -i;
    CHECK(cudaGraphExecMemcpyNodeSetParams1D(executable, in, work, other.data(), BYTES, cudaMemcpyHostToDevice));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < COUNT; i++) EXPECT(b[i] == -i && c[i] == -i + 1000);
    // Changes the source in the graph itself, and runs a copy of the graph.
    CHECK(cudaGraphExecDestroy(executable));
    std::vector<int> third(COUNT, 5);
    CHECK(cudaGraphMemcpyNodeSetParams1D(in, work, third.data(), BYTES, cudaMemcpyHostToDevice));
    cudaGraph_t clone;
    CHECK(cudaGraphClone(&clone, graph));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphInstantiate(&executable, clone, 0));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < COUNT; i++) EXPECT(b[i] == 5 && c[i] == 1005);
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(clone));
    std::printf("graphHost: host function between copies right\n");

    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(work));
    CHECK(cudaFreeHost(a));
    CHECK(cudaFreeHost(b));
    CHECK(cudaFreeHost(c));
    return 0;
}

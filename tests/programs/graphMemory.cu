// Memory of graphs: nodes that allocate and free, memory that a launch leaves allocated, captured
// allocations; nodes that write values and wait for them.
#include "driver.h"

#include <cstring>
#include <vector>

const int COUNT = 1 << 16;
const size_t BYTES = COUNT * sizeof(int);

__global__ void fill(int *values, int count, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = value + i;
}

static cudaGraphNode_t add_fill(cudaGraph_t graph, const cudaGraphNode_t *after, size_t count, int *to, int value) {
    int n = COUNT;
    void *arguments[] = {&to, &n, &value};
    cudaKernelNodeParams params = {};
    params.func = reinterpret_cast<void *>(fill);
    params.gridDim = dim3(COUNT / 256);
    params.blockDim = dim3(256);
    params.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, after, count, &params));
    return node;
}

static cudaMemAllocNodeParams on_device(size_t bytes) {
    cudaMemAllocNodeParams params = {};
    params.poolProps.allocType = cudaMemAllocationTypePinned;
    params.poolProps.location.type = cudaMemLocationTypeDevice;
    params.poolProps.location.id = 0;
    params.bytesize = bytes;
    return params;
}

static void check(const int *device, int value) {
    std::vector<int> host(COUNT);
    CHECK(cudaMemcpy(host.data(), device, BYTES, cudaMemcpyDeviceToHost));
    for (int i = 0; i < COUNT; i++) EXPECT(host[i] == value + i);
}

// Allocated, used and freed within the graph.
static void inside(cudaStream_t stream, int *device) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaGraphNode_t alloc, copy, free;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaMemAllocNodeParams params = on_device(BYTES);
    CHECK(cudaGraphAddMemAllocNode(&alloc, graph, nullptr, 0, &params));
    EXPECT(params.dptr != nullptr);
    cudaGraphNode_t kernel = add_fill(graph, &alloc, 1, static_cast<int *>(params.dptr), 7);
    CHECK(cudaGraphAddMemcpyNode1D(&copy, graph, &kernel, 1, device, params.dptr, BYTES, cudaMemcpyDeviceToDevice));
    CHECK(cudaGraphAddMemFreeNode(&free, graph, &copy, 1, params.dptr));
    void *freed = nullptr;
    CHECK(cudaGraphMemFreeNodeGetParams(free, &freed));
    EXPECT(freed == params.dptr);
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int round = 0; round < 3; round++) {
        CHECK(cudaMemsetAsync(device, 0, BYTES, stream));
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaStreamSynchronize(stream));
        check(device, 7);
    }
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphMemory: allocated and freed within a graph\n");
}

// Memory that a launch leaves allocated, for copies, kernels and frees outside of the graph.
static void outside(cudaStream_t stream) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaGraphNode_t alloc;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaMemAllocNodeParams params = on_device(BYTES);
    CHECK(cudaGraphAddMemAllocNode(&alloc, graph, nullptr, 0, &params));
    int *memory = static_cast<int *>(params.dptr);
    add_fill(graph, &alloc, 1, memory, 100);
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int round = 0; round < 2; round++) {
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaStreamSynchronize(stream));
        check(memory, 100);
        fill<<<COUNT / 256, 256, 0, stream>>>(memory, COUNT, 200);
        CHECK(cudaStreamSynchronize(stream));
        check(memory, 200);
        CHECK(cudaFreeAsync(memory, stream));
        CHECK(cudaStreamSynchronize(stream));
    }
    CHECK(cudaGraphExecDestroy(executable));
    // Each launch frees what the one before has left.
    CHECK(cudaGraphInstantiateWithFlags(&executable, graph, cudaGraphInstantiateFlagAutoFreeOnLaunch));
    for (int round = 0; round < 3; round++) CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    check(memory, 100);
    CHECK(cudaFreeAsync(memory, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphMemory: left allocated by launches\n");
}

static void captured(cudaStream_t stream, int *device) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    int *memory;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaMallocAsync(&memory, BYTES, stream));
    fill<<<COUNT / 256, 256, 0, stream>>>(memory, COUNT, 3);
    CHECK(cudaMemcpyAsync(device, memory, BYTES, cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaFreeAsync(memory, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int round = 0; round < 3; round++) {
        CHECK(cudaMemsetAsync(device, 0, BYTES, stream));
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaStreamSynchronize(stream));
        check(device, 3);
    }
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    unsigned long long used = 1;
    CHECK(cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrUsedMemCurrent, &used));
    CHECK(cudaDeviceGraphMemTrim(0));
    // High-water marks can be reset, and nothing else set.
    unsigned long long none = 0, one = 1, high = 1;
    for (auto mark : {cudaGraphMemAttrUsedMemHigh, cudaGraphMemAttrReservedMemHigh}) {
        CHECK(cudaDeviceSetGraphMemAttribute(0, mark, &none));
        CHECK(cudaDeviceGetGraphMemAttribute(0, mark, &high));
        std::printf("graphMemory: high mark %d, after a reset %s\n", int(mark), high == 0 ? "0" : "above 0");
        std::printf("graphMemory: another value -> %d\n", int(cudaDeviceSetGraphMemAttribute(0, mark, &one)));
    }
    std::printf("graphMemory: current use -> %d\n",
                int(cudaDeviceSetGraphMemAttribute(0, cudaGraphMemAttrUsedMemCurrent, &none)));
    cudaGetLastError();
    std::printf("graphMemory: captured\n");
}

static void memory_operations(cudaStream_t stream, int *device) {
    DRIVER(cuGraphAddBatchMemOpNode);
    DRIVER(cuGraphBatchMemOpNodeSetParams);
    DRIVER(cuGraphExecBatchMemOpNodeSetParams);
    DRIVER(cuCtxGetCurrent);
    CUcontext context;
    CHECK_DRIVER(cuCtxGetCurrent_(&context));
    CHECK(cudaMemset(device, 0, BYTES));
    CHECK(cudaDeviceSynchronize());
    CUstreamBatchMemOpParams items[3] = {};
    const CUdeviceptr at = reinterpret_cast<CUdeviceptr>(device);
    items[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    items[0].writeValue.address = at;
    items[0].writeValue.value = 41;
    items[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    items[1].waitValue.address = at;
    items[1].waitValue.value = 41;
    items[1].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
    items[2].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    items[2].writeValue.address = at + 4;
    items[2].writeValue.value = 42;
    CUDA_BATCH_MEM_OP_NODE_PARAMS params = {};
    params.ctx = context;
    params.count = 3;
    params.paramArray = items;
    CUgraph graph;
    CUgraphNode node;
    cudaGraphExec_t executable;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK_DRIVER(cuGraphAddBatchMemOpNode_(&node, graph, nullptr, 0, &params));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    int values[2];
    CHECK(cudaMemcpy(values, device, sizeof values, cudaMemcpyDeviceToHost));
    EXPECT(values[0] == 41 && values[1] == 42);
    items[2].writeValue.value = 43;
    CHECK_DRIVER(cuGraphExecBatchMemOpNodeSetParams_(executable, node, &params));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(values, device, sizeof values, cudaMemcpyDeviceToHost));
    EXPECT(values[0] == 41 && values[1] == 43);
    items[2].writeValue.value = 44;
    CHECK_DRIVER(cuGraphBatchMemOpNodeSetParams_(node, &params));
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(values, device, sizeof values, cudaMemcpyDeviceToHost));
    EXPECT(values[0] == 41 && values[1] == 44);
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphMemory: memory operations\n");
}

int main() {
    int *device;
    cudaStream_t stream;
    CHECK(cudaMalloc(&device, BYTES));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    inside(stream, device);
    outside(stream);
    captured(stream, device);
    memory_operations(stream, device);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    return 0;
}

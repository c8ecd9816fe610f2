// Graph nodes created from one structure, and child graphs that are copied, moved, read and
// replaced. Host functions between copies of pageable and managed memory reset each result after
// reading it.
#include "driver.h"

#include <numeric>
#include <vector>

// Nodes that do not depend on each other run at the same time.
__global__ void add(int *values, int count, int amount) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) atomicAdd(values + i, amount);
}

__global__ void sum(const int *values, int count, long long *result) {
    long long total = 0;
    for (int i = 0; i < count; i++) total += values[i];
    *result = total;
}

// Takes a while.
__global__ void count_up(volatile int *value, int times) {
    for (int i = 0; i < times; i++) *value = *value + 1;
}

const int COUNT = 1000;

struct Seen {
    long long *result;
    std::vector<long long> all;
};

// Reads the result of the previous copy, and overwrites it.
static void CUDART_CB take_result(void *data) {
    auto *seen = static_cast<Seen *>(data);
    seen->all.push_back(*seen->result);
    *seen->result = 0;
}

static cudaError_t add_node(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after, size_t count, cudaGraphNodeParams *params) {
#if CUDART_VERSION >= 13000
    return cudaGraphAddNode(node, graph, after, nullptr, count, params);
#else
    return cudaGraphAddNode(node, graph, after, count, params);
#endif
}

static cudaGraphNode_t add_kernel(cudaGraph_t graph, const cudaGraphNode_t *after, size_t count, int *values, int amount) {
    int n = COUNT;
    void *arguments[] = {&values, &n, &amount};
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeKernel;
    params.kernel.func = reinterpret_cast<void *>(add);
    params.kernel.gridDim = dim3((COUNT + 127) / 128);
    params.kernel.blockDim = dim3(128);
    params.kernel.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(add_node(&node, graph, after, count, &params));
    return node;
}

// The streams of this program do not wait for the default stream, which a fill only enqueues on.
static void clear(void *memory, size_t bytes) {
    CHECK(cudaMemset(memory, 0, bytes));
    CHECK(cudaDeviceSynchronize());
}

static void launch(cudaGraph_t graph, cudaStream_t stream, int times) {
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < times; i++) CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGraphExecDestroy(executable));
}

static void by_structure(cudaStream_t stream, int *device, long long *total) {
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t set, added, summed, out, host, empty;
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeMemset;
    params.memset.dst = device;
    params.memset.elementSize = 4;
    params.memset.width = COUNT;
    params.memset.height = 1;
    params.memset.value = 5;
    CHECK(add_node(&set, graph, nullptr, 0, &params));
    added = add_kernel(graph, &set, 1, device, 2);
    const int *from = device;
    int n = COUNT;
    void *arguments[] = {&from, &n, &total};
    params = {};
    params.type = cudaGraphNodeTypeKernel;
    params.kernel.func = reinterpret_cast<void *>(sum);
    params.kernel.gridDim = params.kernel.blockDim = dim3(1);
    params.kernel.kernelParams = arguments;
    CHECK(add_node(&summed, graph, &added, 1, &params));
    long long result = -1;
    params = {};
    params.type = cudaGraphNodeTypeMemcpy;
    params.memcpy.copyParams.srcPtr = make_cudaPitchedPtr(total, sizeof result, 1, 1);
    params.memcpy.copyParams.dstPtr = make_cudaPitchedPtr(&result, sizeof result, 1, 1);
    params.memcpy.copyParams.extent = make_cudaExtent(sizeof result, 1, 1);
    params.memcpy.copyParams.kind = cudaMemcpyDefault;
    CHECK(add_node(&out, graph, &summed, 1, &params));
    Seen seen = {&result, {}};
    params = {};
    params.type = cudaGraphNodeTypeHost;
    params.host.fn = take_result;
    params.host.userData = &seen;
    CHECK(add_node(&host, graph, &out, 1, &params));
    params = {};
    params.type = cudaGraphNodeTypeEmpty;
    CHECK(add_node(&empty, graph, &host, 1, &params));
    // The same sum each time, launched without a pause: each copy transfers it although it is
    // unchanged on the device.
    launch(graph, stream, 4);
    for (int i = 0; i < 2; i++) launch(graph, stream, 1);
    EXPECT(seen.all.size() == 6 && result == 0);
    for (long long one : seen.all) EXPECT(one == 7 * COUNT);
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphNodes: result of a copy that a host function resets right\n");
}

static void child_graphs(cudaStream_t stream, int *device) {
    cudaGraph_t child, parent, inner;
    CHECK(cudaGraphCreate(&child, 0));
    cudaGraphNode_t one = add_kernel(child, nullptr, 0, device, 1);
    add_kernel(child, &one, 1, device, 10);
    CHECK(cudaGraphCreate(&parent, 0));
    cudaGraphNode_t node;
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeGraph;
    params.graph.graph = child;
    CHECK(add_node(&node, parent, nullptr, 0, &params));
    std::vector<int> values(COUNT);
    auto first = [&] {
        CHECK(cudaMemcpy(values.data(), device, COUNT * sizeof(int), cudaMemcpyDeviceToHost));
        for (int value : values) EXPECT(value == values[0]);
        clear(device, COUNT * sizeof(int));
        return values[0];
    };
    clear(device, COUNT * sizeof(int));
    launch(parent, stream, 2);
    EXPECT(first() == 22);
    // The copy inside the parent does not change with the original.
    add_kernel(child, nullptr, 0, device, 100);
    launch(parent, stream, 1);
    EXPECT(first() == 11);
    CHECK(cudaGraphChildGraphNodeGetGraph(node, &inner));
    EXPECT(inner != child);
    cudaGraph_t again;
    CHECK(cudaGraphChildGraphNodeGetGraph(node, &again));
    EXPECT(again == inner);
    size_t nodes = 0;
    CHECK(cudaGraphGetNodes(inner, nullptr, &nodes));
    EXPECT(nodes == 2);
    add_kernel(inner, nullptr, 0, device, 1000);
    launch(parent, stream, 1);
    EXPECT(first() == 1011);
    // Replaces the child of an executable graph by another of the same shape.
    cudaGraph_t other;
    CHECK(cudaGraphClone(&other, inner));
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, parent, 0));
    CHECK(cudaGraphExecChildGraphNodeSetParams(executable, node, other));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(first() == 1011);
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(other));
    CHECK(cudaGraphDestroy(child));
    CHECK(cudaGraphDestroy(parent));
#if CUDART_VERSION >= 13000
    // The program can still read a moved child, which is destroyed with its parent.
    CHECK(cudaGraphCreate(&child, 0));
    CHECK(cudaGraphCreate(&parent, 0));
    one = add_kernel(child, nullptr, 0, device, 3);
    params.graph.graph = child;
    params.graph.ownership = cudaGraphChildGraphOwnershipMove;
    CHECK(add_node(&node, parent, nullptr, 0, &params));
    CHECK(cudaGraphChildGraphNodeGetGraph(node, &inner));
    EXPECT(inner == child);
    launch(parent, stream, 1);
    EXPECT(first() == 3);
    CHECK(cudaGraphDestroy(parent));
#endif
    std::printf("graphNodes: child graphs right\n");
}

static void CUDART_CB read_managed(void *data) {
    auto *seen = static_cast<Seen *>(data);
    seen->all.push_back(seen->result[0] + seen->result[COUNT - 1]);
    seen->result[0] = 1000000;
}

__global__ void stamp(long long *values, int count, long long round) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] += round * i;
}

// A host function reads managed memory that the previous kernel wrote, and the next kernel reads
// the function's result.
static void managed(cudaStream_t stream) {
    long long *values;
    CHECK(cudaMallocManaged(&values, COUNT * sizeof *values));
    for (int i = 0; i < COUNT; i++) values[i] = i;
    Seen seen = {values, {}};
    for (int round = 1; round <= 3; round++) {
        stamp<<<(COUNT + 127) / 128, 128, 0, stream>>>(values, COUNT, round);
        CHECK(cudaLaunchHostFunc(stream, read_managed, &seen));
        stamp<<<(COUNT + 127) / 128, 128, 0, stream>>>(values, COUNT, round);
    }
    CHECK(cudaStreamSynchronize(stream));
    const long long last = COUNT - 1;
    EXPECT(seen.all.size() == 3);
    EXPECT(seen.all[0] == last * 2);
    EXPECT(seen.all[1] == 1000000 + last * 5);
    EXPECT(seen.all[2] == 1000000 + last * 10);
    EXPECT(values[0] == 1000000 && values[COUNT - 1] == last * 13);
    CHECK(cudaFree(values));
    std::printf("graphNodes: managed memory around host functions right\n");
}

// Streams that are destroyed while they take part in a capture.
static void destroyed_streams(int *device) {
    for (auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed})
        for (int joined = 0; joined < 3; joined++) {
            cudaStream_t origin, other;
            cudaEvent_t begun, done;
            cudaGraph_t graph = nullptr;
            size_t nodes = 0;
            CHECK(cudaStreamCreateWithFlags(&origin, cudaStreamNonBlocking));
            CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
            CHECK(cudaEventCreateWithFlags(&begun, cudaEventDisableTiming));
            CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
            CHECK(cudaStreamBeginCapture(origin, mode));
            CHECK(cudaMemsetAsync(device, 1, 16, origin));
            CHECK(cudaEventRecord(begun, origin));
            CHECK(cudaStreamWaitEvent(other, begun, 0));
            CHECK(cudaMemsetAsync(device + 64, 1, 16, other));
            if (joined == 1) {
                CHECK(cudaEventRecord(done, other));
                CHECK(cudaStreamWaitEvent(origin, done, 0));
            }
            int end = -1;
            if (joined == 2) {
                // The capture ends with the stream that it began on.
                CHECK(cudaStreamDestroy(origin));
                cudaStreamCaptureStatus status;
                CHECK(cudaStreamIsCapturing(other, &status));
                EXPECT(status == cudaStreamCaptureStatusNone);
                CHECK(cudaStreamDestroy(other));
            } else {
                CHECK(cudaStreamDestroy(other));
                end = cudaStreamEndCapture(origin, &graph);
                if (graph) CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
                if (graph) CHECK(cudaGraphDestroy(graph));
                cudaGetLastError();
                CHECK(cudaStreamDestroy(origin));
            }
            std::printf("graphNodes: mode %d, case %d: end %d, nodes %zu\n", static_cast<int>(mode), joined, end, nodes);
            CHECK(cudaDeviceSynchronize());
            CHECK(cudaEventDestroy(begun));
            CHECK(cudaEventDestroy(done));
        }
    // Pools: nothing is freed and nothing is allocated.
    void *nothing = device;
    CHECK(cudaFreeAsync(nullptr, nullptr));
    CHECK(cudaMallocAsync(&nothing, 0, nullptr));
    EXPECT(nothing == nullptr);
}

// Dependencies with data: a kernel that may begin before the one before has ended.
static void edges(cudaStream_t stream, int *device) {
#if CUDART_VERSION >= 13000
    clear(device, COUNT * sizeof(int));
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t first = add_kernel(graph, nullptr, 0, device, 1), second;
    // The second one may begin before the first one has ended: it works elsewhere.
    int *other;
    CHECK(cudaMalloc(&other, COUNT * sizeof *other));
    clear(other, COUNT * sizeof *other);
    int n = COUNT, amount = 10;
    void *arguments[] = {&other, &n, &amount};
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeKernel;
    params.kernel.func = reinterpret_cast<void *>(add);
    params.kernel.gridDim = dim3((COUNT + 127) / 128);
    params.kernel.blockDim = dim3(128);
    params.kernel.kernelParams = arguments;
    cudaGraphEdgeData edge = {};
    edge.from_port = cudaGraphKernelNodePortProgrammatic;
    edge.type = cudaGraphDependencyTypeProgrammatic;
    CHECK(cudaGraphAddNode(&second, graph, &first, &edge, 1, &params));
    launch(graph, stream, 1);
    std::vector<int> values(COUNT);
    CHECK(cudaMemcpy(values.data(), device, COUNT * sizeof(int), cudaMemcpyDeviceToHost));
    for (int value : values) EXPECT(value == 1);
    CHECK(cudaMemcpy(values.data(), other, COUNT * sizeof(int), cudaMemcpyDeviceToHost));
    for (int value : values) EXPECT(value == 10);
    CHECK(cudaFree(other));
    CHECK(cudaGraphDestroy(graph));
#endif
    std::printf("graphNodes: edges right\n");
}

// Launches of graphs record events, for which streams and the host wait; a captured graph waits for
// an event outside.
static void events(cudaStream_t stream, int *device) {
    const int TIMES = 20000;
    int *seen;
    cudaEvent_t before, behind;
    cudaStream_t other;
    CHECK(cudaMallocHost(&seen, sizeof *seen));
    CHECK(cudaEventCreateWithFlags(&before, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&behind, cudaEventDisableTiming));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (bool captured : {false, true}) {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        if (captured) {
            CHECK(cudaEventRecord(before, other));
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            CHECK(cudaStreamWaitEvent(stream, before, cudaEventWaitExternal));
            count_up<<<1, 1, 0, stream>>>(device, TIMES);
            CHECK(cudaEventRecordWithFlags(behind, stream, cudaEventRecordExternal));
            CHECK(cudaStreamEndCapture(stream, &graph));
        } else {
            CHECK(cudaGraphCreate(&graph, 0));
            cudaGraphNode_t first, last;
            cudaKernelNodeParams kernel = {};
            int times = TIMES;
            void *arguments[] = {&device, &times};
            kernel.func = reinterpret_cast<void *>(count_up);
            kernel.gridDim = kernel.blockDim = 1;
            kernel.kernelParams = arguments;
            CHECK(cudaGraphAddKernelNode(&first, graph, nullptr, 0, &kernel));
            CHECK(cudaGraphAddEventRecordNode(&last, graph, &first, 1, behind));
        }
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK(cudaMemset(device, 0, sizeof *device));
        CHECK(cudaDeviceSynchronize());
        for (int round = 1; round <= 4; round++) {
            // The launch waits for this kernel only if it was captured so.
            if (captured) count_up<<<1, 1, 0, other>>>(device + 1, TIMES);
            CHECK(cudaEventRecord(before, other));
            CHECK(cudaGraphLaunch(exec, stream));
            if (round % 2) {
                CHECK(cudaStreamWaitEvent(other, behind, 0));
                CHECK(cudaMemcpyAsync(seen, device, sizeof *seen, cudaMemcpyDeviceToHost, other));
                CHECK(cudaStreamSynchronize(other));
            } else {
                CHECK(cudaMemcpyAsync(seen, device, sizeof *seen, cudaMemcpyDeviceToHost, stream));
                CHECK(cudaEventSynchronize(behind));
                if (captured) CHECK(cudaEventQuery(before));
                CHECK(cudaEventQuery(behind));
                CHECK(cudaStreamSynchronize(stream));
            }
            EXPECT(*seen == round * TIMES);
        }
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
    }
    CHECK(cudaStreamDestroy(other));
    CHECK(cudaEventDestroy(before));
    CHECK(cudaEventDestroy(behind));
    CHECK(cudaFreeHost(seen));
}

int main() {
    int *device;
    long long *total;
    cudaStream_t stream;
    CHECK(cudaMalloc(&device, COUNT * sizeof *device));
    CHECK(cudaMalloc(&total, sizeof *total));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    by_structure(stream, device, total);
    child_graphs(stream, device);
    managed(stream);
    destroyed_streams(device);
    edges(stream, device);
    events(stream, device);
    // A structure of zeros requests nothing special.
#if CUDA_VERSION >= 12050
    DRIVER(cuCtxCreate_v4);
    DRIVER(cuCtxDestroy);
    CUcontext context;
    CUctxCreateParams none = {};
    CHECK_DRIVER(cuCtxCreate_v4_(&context, &none, 0, 0));
    CHECK_DRIVER(cuCtxDestroy_(context));
#endif
    std::printf("graphNodes: contexts right\n");
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(total));
    CHECK(cudaFree(device));
    return 0;
}

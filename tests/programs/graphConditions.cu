// Conditional nodes: graphs that a launch runs or leaves out, by the value of a condition; bodies
// that are filled node by node or captured.
#include "driver.h"

#include <vector>

const int COUNT = 1000;

__global__ void add(int *values, int count, int amount) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] += amount;
}

#if CUDART_VERSION >= 12040

static void add_kernel(cudaGraph_t graph, int *device, int amount) {
    int n = COUNT;
    void *arguments[] = {&device, &n, &amount};
    cudaKernelNodeParams params = {};
    params.func = reinterpret_cast<void *>(add);
    params.gridDim = dim3((COUNT + 127) / 128);
    params.blockDim = dim3(128);
    params.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, nullptr, 0, &params));
}

static void launch(cudaGraph_t graph, cudaStream_t stream, int *device, int expected) {
    cudaGraphExec_t executable;
    CHECK(cudaMemset(device, 0, COUNT * sizeof(int)));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    std::vector<int> values(COUNT);
    CHECK(cudaMemcpy(values.data(), device, COUNT * sizeof(int), cudaMemcpyDeviceToHost));
    for (int value : values) EXPECT(value == expected);
    CHECK(cudaGraphExecDestroy(executable));
}

static cudaGraph_t *conditional(cudaGraph_t graph, unsigned value, cudaGraphConditionalNodeType type, unsigned size) {
    typedef CUresult (*Create)(CUgraphConditionalHandle *, CUgraph, CUcontext, unsigned, unsigned);
    typedef CUresult (*AddNode)(CUgraphNode *, CUgraph, const CUgraphNode *, const void *, size_t, CUgraphNodeParams *);
    static auto create = reinterpret_cast<Create>(driver_symbol("cuGraphConditionalHandleCreate"));
    static auto add_node = reinterpret_cast<AddNode>(driver_symbol("cuGraphAddNode_v2"));
    DRIVER(cuCtxGetCurrent);
    CUgraphNodeParams params = {};
    CUgraphNode node;
    params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
    CHECK_DRIVER(cuCtxGetCurrent_(&params.conditional.ctx));
    CHECK_DRIVER(create(&params.conditional.handle, graph, params.conditional.ctx, value, CU_GRAPH_COND_ASSIGN_DEFAULT));
    params.conditional.type = static_cast<CUgraphConditionalNodeType>(type);
    params.conditional.size = size;
    CHECK_DRIVER(add_node(&node, graph, nullptr, nullptr, 0, &params));
    CUgraphNodeType found;
    DRIVER(cuGraphNodeGetType);
    CHECK_DRIVER(cuGraphNodeGetType_(node, &found));
    EXPECT(found == CU_GRAPH_NODE_TYPE_CONDITIONAL);
    EXPECT(params.conditional.phGraph_out != nullptr);
    for (unsigned i = 0; i < size; i++) EXPECT(params.conditional.phGraph_out[i] != nullptr);
    return params.conditional.phGraph_out;
}

int main() {
    int *device;
    cudaStream_t stream;
    cudaGraph_t graph;
    CHECK(cudaMalloc(&device, COUNT * sizeof *device));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (unsigned value = 0; value < 2; value++) {
        CHECK(cudaGraphCreate(&graph, 0));
        add_kernel(conditional(graph, value, cudaGraphCondTypeIf, 1)[0], device, 5);
        launch(graph, stream, device, value ? 10 : 0);
        CHECK(cudaGraphDestroy(graph));
    }
    std::printf("graphConditions: if right\n");
    // A body that is captured.
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraph_t body = conditional(graph, 1, cudaGraphCondTypeIf, 1)[0], same = nullptr;
    CHECK(cudaStreamBeginCaptureToGraph(stream, body, nullptr, nullptr, 0, cudaStreamCaptureModeThreadLocal));
    add<<<(COUNT + 127) / 128, 128, 0, stream>>>(device, COUNT, 1);
    CHECK(cudaStreamEndCapture(stream, &same));
    EXPECT(same == body);
    // Without the graph, which the program has already.
    cudaGraphNode_t last;
    size_t nodes = 1;
    CHECK(cudaGraphGetNodes(body, &last, &nodes));
    CHECK(cudaStreamBeginCaptureToGraph(stream, body, &last, nullptr, 1, cudaStreamCaptureModeThreadLocal));
    add<<<(COUNT + 127) / 128, 128, 0, stream>>>(device, COUNT, 2);
    CHECK(cudaStreamEndCapture(stream, nullptr));
    CHECK(cudaGraphGetNodes(body, nullptr, &nodes));
    EXPECT(nodes == 2);
    launch(graph, stream, device, 6);
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphConditions: captured body right\n");
    // A loop whose condition is false from the start.
    CHECK(cudaGraphCreate(&graph, 0));
    add_kernel(conditional(graph, 0, cudaGraphCondTypeWhile, 1)[0], device, 5);
    launch(graph, stream, device, 0);
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphConditions: while right\n");
#if CUDART_VERSION >= 12080
    for (unsigned value = 0; value < 2; value++) {
        CHECK(cudaGraphCreate(&graph, 0));
        cudaGraph_t *bodies = conditional(graph, value, cudaGraphCondTypeIf, 2);
        add_kernel(bodies[0], device, 5);
        add_kernel(bodies[1], device, 7);
        launch(graph, stream, device, value ? 10 : 14);
        CHECK(cudaGraphDestroy(graph));
    }
    for (unsigned value = 0; value < 4; value++) {
        CHECK(cudaGraphCreate(&graph, 0));
        cudaGraph_t *bodies = conditional(graph, value, cudaGraphCondTypeSwitch, 3);
        for (int i = 0; i < 3; i++) add_kernel(bodies[i], device, 10 + i);
        launch(graph, stream, device, value < 3 ? 2 * (10 + int(value)) : 0);
        CHECK(cudaGraphDestroy(graph));
    }
#endif
    std::printf("graphConditions: branches right\n");
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    return 0;
}

#else

int main() { return 0; }

#endif

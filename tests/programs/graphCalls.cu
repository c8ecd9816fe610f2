// Calls about graphs that no other program makes: a graph's roots and a clone's nodes, nodes that
// are switched off, parameters by the forms of old releases, events of nodes, lists of edges longer
// than any message, of which a wrong one changes nothing.
#include "driver.h"

#include <algorithm>
#include <cstring>
#include <vector>

const int COUNT = 1000;

__global__ void add(int *values, int count, int amount) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] += amount;
}

static int called;
static void CUDART_CB call(void *data) { called += *static_cast<int *>(data); }

typedef CUresult (*AddEdges)(CUgraph, const CUgraphNode *, const CUgraphNode *, size_t);
typedef CUresult (*GetEdges)(CUgraph, CUgraphNode *, CUgraphNode *, size_t *);

static size_t number_of_edges(CUgraph graph) {
    static auto edges = reinterpret_cast<GetEdges>(driver_symbol("cuGraphGetEdges"));
    size_t count = 0;
    CHECK_DRIVER(edges(graph, nullptr, nullptr, &count));
    return count;
}

// 319,600 edges, twice 2.5 MB.
static void long_lists() {
    const int NODES = 800;
    DRIVER(cuGraphCreate);
    DRIVER(cuGraphDestroy);
    DRIVER(cuGraphAddEmptyNode);
    DRIVER(cuGraphGetNodes);
    DRIVER(cuGraphGetRootNodes);
    auto add_edges = reinterpret_cast<AddEdges>(driver_symbol("cuGraphAddDependencies"));
    auto remove_edges = reinterpret_cast<AddEdges>(driver_symbol("cuGraphRemoveDependencies"));
    auto edges = reinterpret_cast<GetEdges>(driver_symbol("cuGraphGetEdges"));
    CUgraph graph;
    CHECK_DRIVER(cuGraphCreate_(&graph, 0));
    std::vector<CUgraphNode> nodes(NODES), from, to;
    for (CUgraphNode &node : nodes) CHECK_DRIVER(cuGraphAddEmptyNode_(&node, graph, nullptr, 0));
    for (int a = 0; a < NODES; a++)
        for (int b = a + 1; b < NODES; b++) {
            from.push_back(nodes[a]);
            to.push_back(nodes[b]);
        }
    // The last edge leads from a node to itself.
    from.push_back(nodes[0]);
    to.push_back(nodes[0]);
    SHOW_DRIVER(add_edges(graph, from.data(), to.data(), from.size()));
    std::printf("edges after a wrong one: %zu\n", number_of_edges(graph));
    from.pop_back();
    to.pop_back();
    CHECK_DRIVER(add_edges(graph, from.data(), to.data(), from.size()));
    std::printf("edges: %zu\n", number_of_edges(graph));
    size_t count = from.size();
    std::vector<CUgraphNode> from_back(count), to_back(count);
    CHECK_DRIVER(edges(graph, from_back.data(), to_back.data(), &count));
    EXPECT(count == from.size());
    auto sorted = [](const std::vector<CUgraphNode> &a, const std::vector<CUgraphNode> &b) {
        std::vector<std::pair<CUgraphNode, CUgraphNode>> pairs;
        for (size_t i = 0; i < a.size(); i++) pairs.push_back({a[i], b[i]});
        std::sort(pairs.begin(), pairs.end());
        return pairs;
    };
    EXPECT(sorted(from, to) == sorted(from_back, to_back));
    CUgraphNode root = nullptr;
    count = 1;
    CHECK_DRIVER(cuGraphGetRootNodes_(graph, &root, &count));
    EXPECT(count == 1 && root == nodes[0]);
    CHECK_DRIVER(remove_edges(graph, from.data(), to.data(), from.size()));
    std::printf("edges: %zu\n", number_of_edges(graph));
    CHECK_DRIVER(cuGraphDestroy_(graph));
}

typedef CUresult (*GetKernel)(CUgraphNode, CUDA_KERNEL_NODE_PARAMS_v1 *);
typedef CUresult (*SetKernel)(CUgraphNode, const CUDA_KERNEL_NODE_PARAMS_v1 *);

static cudaGraphNode_t kernel_node(cudaGraph_t graph, int *device, int amount, std::vector<cudaGraphNode_t> after) {
    int n = COUNT;
    void *arguments[] = {&device, &n, &amount};
    cudaKernelNodeParams params = {};
    params.func = reinterpret_cast<void *>(add);
    params.gridDim = dim3(8);
    params.blockDim = dim3(128);
    params.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, after.data(), after.size(), &params));
    return node;
}

static int first_value(int *device) {
    std::vector<int> values(COUNT);
    CHECK(cudaMemcpy(values.data(), device, COUNT * sizeof(int), cudaMemcpyDeviceToHost));
    for (int value : values) EXPECT(value == values[0]);
    return values[0];
}

static int run(cudaGraphExec_t executable, cudaStream_t stream, int *device) {
    CHECK(cudaMemset(device, 0, COUNT * sizeof(int)));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    return first_value(device);
}

static void kernels(cudaStream_t stream, int *device) {
    DRIVER(cuGraphNodeSetEnabled);
    DRIVER(cuGraphNodeGetEnabled);
    DRIVER(cuGraphNodeFindInClone);
    DRIVER(cuGraphDestroyNode);
    auto get = reinterpret_cast<GetKernel>(driver_symbol("cuGraphKernelNodeGetParams"));
    auto set = reinterpret_cast<SetKernel>(driver_symbol("cuGraphKernelNodeSetParams"));
    cudaGraph_t graph, clone;
    cudaGraphExec_t executable;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t first = kernel_node(graph, device, 1, {});
    cudaGraphNode_t second = kernel_node(graph, device, 10, {first});
    cudaGraphNode_t third = kernel_node(graph, device, 100, {second});
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    std::printf("all: %d\n", run(executable, stream, device));
    CHECK_DRIVER(cuGraphNodeSetEnabled_(executable, second, 0));
    unsigned enabled = 99;
    CHECK_DRIVER(cuGraphNodeGetEnabled_(executable, second, &enabled));
    std::printf("enabled %u: %d\n", enabled, run(executable, stream, device));
    CHECK_DRIVER(cuGraphNodeSetEnabled_(executable, second, 1));
    CHECK_DRIVER(cuGraphNodeGetEnabled_(executable, second, &enabled));
    std::printf("enabled %u: %d\n", enabled, run(executable, stream, device));
    CHECK(cudaGraphExecDestroy(executable));

    // The structure of releases before CUDA 12.
    CUDA_KERNEL_NODE_PARAMS_v1 params = {};
    CHECK_DRIVER(get(third, &params));
    EXPECT(params.gridDimX == 8 && params.blockDimX == 128 && params.kernelParams != nullptr);
    EXPECT(*static_cast<int *>(params.kernelParams[2]) == 100);
    int amount = 500;
    void *arguments[] = {params.kernelParams[0], params.kernelParams[1], &amount};
    params.kernelParams = arguments;
    CHECK_DRIVER(set(third, &params));
    // A clone has nodes of its own, which changes of the original do not reach.
    CHECK(cudaGraphClone(&clone, graph));
    CUgraphNode copy = nullptr, other = nullptr;
    CHECK_DRIVER(cuGraphNodeFindInClone_(&copy, second, clone));
    EXPECT(copy != nullptr && copy != second);
    SHOW_DRIVER(cuGraphNodeFindInClone_(&other, copy, graph));
    CHECK_DRIVER(cuGraphDestroyNode_(copy));
    SHOW_DRIVER(cuGraphNodeFindInClone_(&other, second, clone));
    size_t count = 0;
    CHECK(cudaGraphGetNodes(clone, nullptr, &count));
    std::printf("clone: %zu nodes, %zu edges\n", count, number_of_edges(clone));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    std::printf("original: %d\n", run(executable, stream, device));
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(clone));
    CHECK(cudaGraphDestroy(graph));
}

static void copies_and_fills(cudaStream_t stream, int *device) {
    DRIVER(cuGraphMemcpyNodeSetParams);
    DRIVER(cuGraphMemsetNodeSetParams);
    DRIVER(cuGraphExecMemcpyNodeSetParams);
    DRIVER(cuGraphExecHostNodeSetParams);
    DRIVER(cuGraphNodeSetParams);
    DRIVER(cuGraphExecNodeSetParams);
    DRIVER(cuCtxGetCurrent);
    int *other, host[2] = {1, 20};
    CHECK(cudaMalloc(&other, COUNT * sizeof(int)));
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaMemsetParams fill = {};
    fill.dst = other;
    fill.value = 0x01010101;
    fill.elementSize = 4;
    fill.width = COUNT;
    fill.height = 1;
    cudaGraphNode_t fill_node, copy_node, host_node;
    CHECK(cudaGraphAddMemsetNode(&fill_node, graph, nullptr, 0, &fill));
    CHECK(cudaGraphAddMemcpyNode1D(&copy_node, graph, &fill_node, 1, device, other, 4, cudaMemcpyDeviceToDevice));
    cudaHostNodeParams on_host = {call, &host[0]};
    CHECK(cudaGraphAddHostNode(&host_node, graph, &copy_node, 1, &on_host));

    CUDA_MEMSET_NODE_PARAMS values = {};
    values.dst = reinterpret_cast<CUdeviceptr>(other);
    values.value = 5;
    values.elementSize = 4;
    values.width = COUNT;
    values.height = 1;
    CHECK_DRIVER(cuGraphMemsetNodeSetParams_(fill_node, &values));
    CUDA_MEMCPY3D copy = {};
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = reinterpret_cast<CUdeviceptr>(other);
    copy.dstDevice = reinterpret_cast<CUdeviceptr>(device);
    copy.WidthInBytes = COUNT * sizeof(int);
    copy.Height = copy.Depth = 1;
    CHECK_DRIVER(cuGraphMemcpyNodeSetParams_(copy_node, &copy));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    called = 0;
    int found = run(executable, stream, device);
    std::printf("fill and copy: %d, called %d\n", found, called);

    // The executable graph changes alone. A copy of the first half leaves zeros behind it.
    CUcontext context;
    CHECK_DRIVER(cuCtxGetCurrent_(&context));
    copy.WidthInBytes /= 2;
    CHECK_DRIVER(cuGraphExecMemcpyNodeSetParams_(executable, copy_node, &copy, context));
    CUDA_HOST_NODE_PARAMS function = {call, &host[1]};
    CHECK_DRIVER(cuGraphExecHostNodeSetParams_(executable, host_node, &function));
    CHECK(cudaMemset(device, 0, COUNT * sizeof(int)));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    int ends[2];
    CHECK(cudaMemcpy(&ends[0], device, 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&ends[1], device + COUNT - 1, 4, cudaMemcpyDeviceToHost));
    std::printf("half: %d and %d, called %d\n", ends[0], ends[1], called);

    // By the structure for all types: of the executable graph, then of the node.
    CUgraphNodeParams any = {};
    any.type = CU_GRAPH_NODE_TYPE_MEMSET;
    any.memset.dst = values.dst;
    any.memset.value = 9;
    any.memset.elementSize = 4;
    any.memset.width = COUNT;
    any.memset.height = 1;
    any.memset.ctx = context;
    CHECK_DRIVER(cuGraphExecNodeSetParams_(executable, fill_node, &any));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(&ends[0], device, 4, cudaMemcpyDeviceToHost));
    std::printf("any type, executable: %d\n", ends[0]);
    any.memset.value = 11;
    CHECK_DRIVER(cuGraphNodeSetParams_(fill_node, &any));
    any.type = CU_GRAPH_NODE_TYPE_KERNEL;
    EXPECT(cuGraphNodeSetParams_(fill_node, &any) != CUDA_SUCCESS);
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    std::printf("any type, node: %d\n", run(executable, stream, device));
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaFree(other));
}

static void events(cudaStream_t stream, int *device) {
    DRIVER(cuGraphAddEventRecordNode);
    DRIVER(cuGraphAddEventWaitNode);
    DRIVER(cuGraphEventWaitNodeSetEvent);
    DRIVER(cuGraphEventWaitNodeGetEvent);
    DRIVER(cuGraphExecEventRecordNodeSetEvent);
    DRIVER(cuGraphExecEventWaitNodeSetEvent);
    DRIVER(cuEventQuery);
    cudaEvent_t events[3];
    for (cudaEvent_t &event : events) CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaGraphCreate(&graph, 0));
    CUgraphNode wait, record;
    CHECK_DRIVER(cuGraphAddEventWaitNode_(&wait, graph, nullptr, 0, events[0]));
    cudaGraphNode_t kernel = kernel_node(graph, device, 3, {wait});
    CHECK_DRIVER(cuGraphAddEventRecordNode_(&record, graph, &kernel, 1, events[1]));
    CUevent found;
    CHECK_DRIVER(cuGraphEventWaitNodeSetEvent_(wait, events[2]));
    CHECK_DRIVER(cuGraphEventWaitNodeGetEvent_(wait, &found));
    EXPECT(found == events[2]);
    SHOW_DRIVER(cuGraphEventWaitNodeSetEvent_(record, events[2]));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK_DRIVER(cuGraphExecEventWaitNodeSetEvent_(executable, wait, events[0]));
    CHECK_DRIVER(cuGraphExecEventRecordNodeSetEvent_(executable, record, events[2]));
    CHECK(cudaEventRecord(events[0], stream));
    std::printf("events: %d\n", run(executable, stream, device));
    CHECK_DRIVER(cuEventQuery_(events[2]));
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    for (cudaEvent_t event : events) CHECK(cudaEventDestroy(event));
}

// The first forms of the instantiation, with a buffer for text about an error.
static void instantiations(cudaStream_t stream, int *device) {
    typedef CUresult (*Instantiate)(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t);
    auto add_edges = reinterpret_cast<AddEdges>(driver_symbol("cuGraphAddDependencies"));
    for (const char *form : {"cuGraphInstantiate", "cuGraphInstantiate_v2"}) {
        auto instantiate = reinterpret_cast<Instantiate>(driver_symbol(form));
        cudaGraph_t graph;
        CHECK(cudaGraphCreate(&graph, 0));
        cudaGraphNode_t first = kernel_node(graph, device, 1, {});
        cudaGraphNode_t second = kernel_node(graph, device, 1, {first});
        CUgraphExec executable = nullptr;
        CUgraphNode wrong = first;
        char text[256];
        CHECK_DRIVER(instantiate(&executable, graph, &wrong, text, sizeof text));
        std::printf("%s: %d\n", form, run(executable, stream, device));
        EXPECT(wrong == nullptr && text[0] == 0);
        CHECK(cudaGraphExecDestroy(executable));
        // A circle, which no instantiation accepts.
        SHOW_DRIVER(add_edges(graph, &second, &first, 1));
        executable = nullptr;
        std::memset(text, 'x', sizeof text);
        wrong = first;
        SHOW_DRIVER(instantiate(&executable, graph, &wrong, text, sizeof text));
        EXPECT(wrong == nullptr && text[0] == 0);
        SHOW_DRIVER(instantiate(&executable, graph, nullptr, nullptr, 0));
        EXPECT(executable == nullptr);
        CHECK(cudaGraphDestroy(graph));
    }
}

// Drivers since CUDA 13.1 name graphs and nodes by numbers.
static void numbers(int *device) {
    typedef CUresult (*OfGraph)(CUgraph, unsigned *);
    typedef CUresult (*OfExecutable)(CUgraphExec, unsigned *);
    typedef CUresult (*OfNode)(CUgraphNode, unsigned *);
    typedef CUresult (*Containing)(CUgraphNode, CUgraph *);
    auto of_graph = reinterpret_cast<OfGraph>(driver_symbol_if("cuGraphGetId"));
    auto of_executable = reinterpret_cast<OfExecutable>(driver_symbol_if("cuGraphExecGetId"));
    auto of_node = reinterpret_cast<OfNode>(driver_symbol_if("cuGraphNodeGetLocalId"));
    auto containing = reinterpret_cast<Containing>(driver_symbol_if("cuGraphNodeGetContainingGraph"));
    cudaGraph_t graphs[2];
    cudaGraphNode_t nodes[2];
    cudaGraphExec_t executable;
    for (int i = 0; i < 2; i++) {
        CHECK(cudaGraphCreate(&graphs[i], 0));
        nodes[i] = kernel_node(graphs[i], device, 1, {});
    }
    CHECK(cudaGraphInstantiate(&executable, graphs[0], 0));
    unsigned numbers[3] = {};
    // A driver without the calls may still export them.
    if (of_graph && of_executable && of_graph(graphs[0], &numbers[0]) == CUDA_SUCCESS) {
        CHECK_DRIVER(of_graph(graphs[1], &numbers[1]));
        CHECK_DRIVER(of_executable(executable, &numbers[2]));
        EXPECT(numbers[0] != numbers[1] && numbers[0] != numbers[2] && numbers[1] != numbers[2]);
    }
    unsigned local[2];
    if (of_node && of_node(nodes[0], &local[0]) == CUDA_SUCCESS) CHECK_DRIVER(of_node(nodes[1], &local[1]));
    CUgraph around = nullptr;
    if (containing && containing(nodes[1], &around) == CUDA_SUCCESS) EXPECT(around == graphs[1]);
    CHECK(cudaGraphExecDestroy(executable));
    for (cudaGraph_t graph : graphs) CHECK(cudaGraphDestroy(graph));
    std::printf("graphCalls: numbers right\n");
}

int main() {
    int *device;
    cudaStream_t stream;
    CHECK(cudaMalloc(&device, COUNT * sizeof(int)));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    kernels(stream, device);
    copies_and_fills(stream, device);
    events(stream, device);
    instantiations(stream, device);
    numbers(device);
    long_lists();
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    return 0;
}

// The surroundings of nodes of a graph: user objects with destructors, the graph of a capture in
// progress and its dependencies, neighbours and edges, launch attributes, the drawing.
#include "driver.h"

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include <unistd.h>

typedef CUresult (*CaptureInfo)(CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **, size_t *);
typedef CUresult (*UpdateDependencies)(CUstream, CUgraphNode *, size_t, unsigned);
typedef CUresult (*Neighbours)(CUgraphNode, CUgraphNode *, size_t *);
typedef CUresult (*Edges)(CUgraph, CUgraphNode *, CUgraphNode *, size_t *);
typedef CUresult (*NeighboursWithData)(CUgraphNode, CUgraphNode *, void *, size_t *);
typedef CUresult (*EdgesWithData)(CUgraph, CUgraphNode *, CUgraphNode *, void *, size_t *);

#define NAMED(type, symbol) static auto symbol##_ = reinterpret_cast<type>(driver_symbol(#symbol))

const int COUNT = 1000;

__global__ void add(int *values, int count, int amount) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] += amount;
}

struct Owned {
    std::atomic<int> destroyed{0};
};

static void CUDART_CB destroy(void *data) { static_cast<Owned *>(data)->destroyed++; }

static void wait_destroyed(Owned &owned) {
    for (int i = 0; i < 10000 && owned.destroyed == 0; i++) usleep(1000);
    EXPECT(owned.destroyed == 1);
}

static cudaGraphNode_t add_kernel(cudaGraph_t graph, const cudaGraphNode_t *after, size_t count, int *device, int amount) {
    int n = COUNT;
    void *arguments[] = {&device, &n, &amount};
    cudaKernelNodeParams params = {};
    params.func = reinterpret_cast<void *>(add);
    params.gridDim = dim3((COUNT + 127) / 128);
    params.blockDim = dim3(128);
    params.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, after, count, &params));
    return node;
}

static void user_objects(cudaStream_t stream, int *device) {
    static Owned alone, moved, shared;
    cudaUserObject_t object;
    SHOW(cudaUserObjectCreate(&object, &alone, destroy, 0, cudaUserObjectNoDestructorSync));
    SHOW(cudaUserObjectCreate(&object, &alone, nullptr, 1, cudaUserObjectNoDestructorSync));
    SHOW(cudaUserObjectCreate(nullptr, &alone, destroy, 1, cudaUserObjectNoDestructorSync));
    SHOW(cudaUserObjectCreate(&object, &alone, destroy, 1, 0));

    // Three references, all of them the program's.
    CHECK(cudaUserObjectCreate(&object, &alone, destroy, 1, cudaUserObjectNoDestructorSync));
    CHECK(cudaUserObjectRetain(object, 2));
    CHECK(cudaUserObjectRelease(object, 2));
    usleep(20000);
    EXPECT(alone.destroyed == 0);
    CHECK(cudaUserObjectRelease(object, 1));
    wait_destroyed(alone);

    // The only reference moves into a graph, and the executable graph has one of its own.
    cudaGraph_t graph, clone;
    cudaGraphExec_t executable;
    CHECK(cudaGraphCreate(&graph, 0));
    add_kernel(graph, nullptr, 0, device, 1);
    CHECK(cudaUserObjectCreate(&object, &moved, destroy, 1, cudaUserObjectNoDestructorSync));
    CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    usleep(20000);
    EXPECT(moved.destroyed == 0);
    CHECK(cudaGraphExecDestroy(executable));
    wait_destroyed(moved);

    // The program and two graphs share an object.
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaUserObjectCreate(&object, &shared, destroy, 1, cudaUserObjectNoDestructorSync));
    CHECK(cudaGraphRetainUserObject(graph, object, 2, 0));
    CHECK(cudaGraphClone(&clone, graph));
    CHECK(cudaGraphReleaseUserObject(graph, object, 1));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaUserObjectRelease(object, 1));
    usleep(20000);
    EXPECT(shared.destroyed == 0);
    CHECK(cudaGraphDestroy(clone));
    wait_destroyed(shared);
    std::printf("graphObjects: user objects right\n");
}

static void captures(cudaStream_t stream, int *device) {
    NAMED(CaptureInfo, cuStreamGetCaptureInfo_v2);
    NAMED(UpdateDependencies, cuStreamUpdateCaptureDependencies);
    static Owned owned;
    cudaUserObject_t object;
    CUstreamCaptureStatus status;
    CUgraph graph = nullptr;
    cuuint64_t id;
    const CUgraphNode *nodes;
    size_t count;
    CHECK(cudaMemset(device, 0, COUNT * sizeof *device));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    add<<<(COUNT + 127) / 128, 128, 0, stream>>>(device, COUNT, 1);
    CHECK_DRIVER(cuStreamGetCaptureInfo_v2_(stream, &status, &id, &graph, &nodes, &count));
    EXPECT(status == CU_STREAM_CAPTURE_STATUS_ACTIVE && graph != nullptr && count == 1);
    CUgraphNode first = nodes[0];
    // As communication libraries do: an object that lives as long as the graph that is captured.
    CHECK(cudaUserObjectCreate(&object, &owned, destroy, 1, cudaUserObjectNoDestructorSync));
    CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    // A node of the program, which the next captured one depends on.
    CUgraphNode second = add_kernel(graph, &first, 1, device, 10);
    CHECK_DRIVER(cuStreamUpdateCaptureDependencies_(stream, &second, 1, 1));
    CHECK_DRIVER(cuStreamGetCaptureInfo_v2_(stream, &status, &id, &graph, &nodes, &count));
    EXPECT(count == 1 && nodes[0] == second);
    // Added to the present ones.
    CHECK_DRIVER(cuStreamUpdateCaptureDependencies_(stream, &first, 1, 0));
    CHECK_DRIVER(cuStreamGetCaptureInfo_v2_(stream, &status, &id, &graph, &nodes, &count));
    EXPECT(count == 2);
    add<<<(COUNT + 127) / 128, 128, 0, stream>>>(device, COUNT, 100);
    cudaGraph_t ended;
    CHECK(cudaStreamEndCapture(stream, &ended));
    EXPECT(ended == graph);
    size_t total = 0;
    CHECK(cudaGraphGetNodes(ended, nullptr, &total));
    EXPECT(total == 3);
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, ended, 0));
    CHECK(cudaGraphDestroy(ended));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    std::vector<int> values(COUNT);
    CHECK(cudaMemcpy(values.data(), device, COUNT * sizeof(int), cudaMemcpyDeviceToHost));
    for (int value : values) EXPECT(value == 222);
    EXPECT(owned.destroyed == 0);
    CHECK(cudaGraphExecDestroy(executable));
    wait_destroyed(owned);
    SHOW_DRIVER(cuStreamUpdateCaptureDependencies_(stream, nullptr, 0, 1));
    std::printf("graphObjects: captures right\n");
}

static void neighbours(int *device) {
    NAMED(Neighbours, cuGraphNodeGetDependencies);
    NAMED(Neighbours, cuGraphNodeGetDependentNodes);
    NAMED(Edges, cuGraphGetEdges);
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t top = add_kernel(graph, nullptr, 0, device, 1);
    cudaGraphNode_t left = add_kernel(graph, &top, 1, device, 1), right = add_kernel(graph, &top, 1, device, 1);
    cudaGraphNode_t both[] = {left, right};
    cudaGraphNode_t bottom = add_kernel(graph, both, 2, device, 1);
    size_t count = 0;
    CHECK_DRIVER(cuGraphNodeGetDependencies_(bottom, nullptr, &count));
    EXPECT(count == 2);
    CUgraphNode found[4] = {top, top, top, top};
    count = 4;
    CHECK_DRIVER(cuGraphNodeGetDependencies_(bottom, found, &count));
    EXPECT(count == 2 && found[2] == nullptr && found[3] == nullptr);
    EXPECT((found[0] == left && found[1] == right) || (found[0] == right && found[1] == left));
    count = 4;
    CHECK_DRIVER(cuGraphNodeGetDependentNodes_(top, found, &count));
    EXPECT(count == 2);
    EXPECT((found[0] == left && found[1] == right) || (found[0] == right && found[1] == left));
    CHECK_DRIVER(cuGraphNodeGetDependencies_(top, nullptr, &count));
    EXPECT(count == 0);
    SHOW_DRIVER(cuGraphNodeGetDependencies_(nullptr, nullptr, &count));
#if CUDA_VERSION >= 12030
    NAMED(NeighboursWithData, cuGraphNodeGetDependencies_v2);
    NAMED(NeighboursWithData, cuGraphNodeGetDependentNodes_v2);
    NAMED(EdgesWithData, cuGraphGetEdges_v2);
    CUgraphNode from[4], to[4];
    unsigned long long data[4] = {1, 1, 1, 1};
    count = 4;
    CHECK_DRIVER(cuGraphGetEdges_v2_(graph, from, to, data, &count));
    EXPECT(count == 4 && data[0] == 0 && data[3] == 0);
    count = 2;
    CHECK_DRIVER(cuGraphNodeGetDependencies_v2_(bottom, found, data, &count));
    EXPECT(count == 2 && data[0] == 0);
    count = 2;
    CHECK_DRIVER(cuGraphNodeGetDependentNodes_v2_(top, found, data, &count));
    EXPECT(count == 2 && data[0] == 0);
#endif
    CUgraphNode starts[4], ends[4];
    count = 4;
    CHECK_DRIVER(cuGraphGetEdges_(graph, starts, ends, &count));
    EXPECT(count == 4);
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphObjects: neighbours right\n");
}

static void attributes(int *device) {
    DRIVER(cuGraphKernelNodeGetAttribute);
    DRIVER(cuGraphKernelNodeSetAttribute);
    DRIVER(cuGraphKernelNodeCopyAttributes);
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t one = add_kernel(graph, nullptr, 0, device, 1), other = add_kernel(graph, nullptr, 0, device, 1);
    CUlaunchAttributeValue value = {}, read = {};
    value.priority = -1;
    CHECK_DRIVER(cuGraphKernelNodeSetAttribute_(one, CU_LAUNCH_ATTRIBUTE_PRIORITY, &value));
    CHECK_DRIVER(cuGraphKernelNodeGetAttribute_(one, CU_LAUNCH_ATTRIBUTE_PRIORITY, &read));
    EXPECT(read.priority == -1);
    CHECK_DRIVER(cuGraphKernelNodeGetAttribute_(other, CU_LAUNCH_ATTRIBUTE_PRIORITY, &read));
    EXPECT(read.priority == 0);
    CHECK_DRIVER(cuGraphKernelNodeCopyAttributes_(other, one));
    CHECK_DRIVER(cuGraphKernelNodeGetAttribute_(other, CU_LAUNCH_ATTRIBUTE_PRIORITY, &read));
    EXPECT(read.priority == -1);
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphObjects: attributes right\n");
}

static void drawing(int *device) {
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t one = add_kernel(graph, nullptr, 0, device, 1);
    add_kernel(graph, &one, 1, device, 1);
    char path[] = "/tmp/graphObjects-XXXXXX";
    int file = mkstemp(path);
    EXPECT(file >= 0 && close(file) == 0);
    CHECK(cudaGraphDebugDotPrint(graph, path, 0));
    std::FILE *drawn = std::fopen(path, "r");
    EXPECT(drawn != nullptr);
    std::string text(1 << 16, 0);
    text.resize(std::fread(&text[0], 1, text.size(), drawn));
    EXPECT(std::fclose(drawn) == 0 && unlink(path) == 0);
    EXPECT(text.compare(0, 7, "digraph") == 0 && text.find("->") != std::string::npos);
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphObjects: drawing right\n");
}

// More edges in one call than a worker takes at once.
static void many_edges() {
    typedef CUresult (*Change)(CUgraph, const CUgraphNode *, const CUgraphNode *, size_t);
    NAMED(Change, cuGraphAddDependencies);
    NAMED(Change, cuGraphRemoveDependencies);
    NAMED(Edges, cuGraphGetEdges);
    const int nodes = 750;
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    std::vector<CUgraphNode> all(nodes), from, to;
    for (auto &node : all) CHECK(cudaGraphAddEmptyNode(&node, graph, nullptr, 0));
    for (int i = 0; i < nodes; i++)
        for (int k = 0; k < i; k++) {
            from.push_back(all[k]);
            to.push_back(all[i]);
        }
    for (size_t count : {size_t(70000), from.size()}) {
        size_t found = 0;
        CHECK_DRIVER(cuGraphAddDependencies_(graph, from.data(), to.data(), count));
        if (count == 70000) {
            CHECK_DRIVER(cuGraphGetEdges_(graph, nullptr, nullptr, &found));
            EXPECT(found == count);
        }
        CHECK_DRIVER(cuGraphRemoveDependencies_(graph, from.data(), to.data(), count));
        CHECK_DRIVER(cuGraphGetEdges_(graph, nullptr, nullptr, &found));
        EXPECT(found == 0);
    }
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphObjects: many edges right\n");
}

// The reason why a graph with a circle cannot be instantiated.
static void circles() {
    typedef CUresult (*Change)(CUgraph, const CUgraphNode *, const CUgraphNode *, size_t);
    typedef CUresult (*Instantiate)(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *);
    NAMED(Change, cuGraphAddDependencies);
    NAMED(Instantiate, cuGraphInstantiateWithParams);
    cudaGraph_t graph;
    CUgraphNode nodes[3];
    CUgraphExec executable;
    CHECK(cudaGraphCreate(&graph, 0));
    for (auto &node : nodes) CHECK(cudaGraphAddEmptyNode(&node, graph, nullptr, 0));
    const CUgraphNode next[] = {nodes[1], nodes[2], nodes[0]};
    for (int count : {2, 3}) {
        CUDA_GRAPH_INSTANTIATE_PARAMS params = {};
        params.result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
        CHECK_DRIVER(cuGraphAddDependencies_(graph, nodes + (count == 3 ? 2 : 0), next + (count == 3 ? 2 : 0), count == 3 ? 1 : 2));
        const CUresult made = cuGraphInstantiateWithParams_(&executable, graph, &params);
        EXPECT((made == CUDA_SUCCESS) == (count == 2));
        EXPECT(params.result_out == (count == 2 ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE));
        bool known = params.hErrNode_out == nullptr;
        for (auto node : nodes) known |= count == 3 && params.hErrNode_out == node;
        EXPECT(known);
        if (made == CUDA_SUCCESS) CHECK(cudaGraphExecDestroy(executable));
    }
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphObjects: circles right\n");
}

int main() {
    int *device;
    cudaStream_t stream;
    CHECK(cudaMalloc(&device, COUNT * sizeof *device));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    user_objects(stream, device);
    captures(stream, device);
    neighbours(device);
    many_edges();
    circles();
    attributes(device);
    drawing(device);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    return 0;
}

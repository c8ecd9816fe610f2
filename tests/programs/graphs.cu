// Graphs built node by node: fill, copies, kernels and a host function; changed parameters in the
// executable graph; update from another graph; a captured graph as a child.
#include "check.h"

#include <vector>

__global__ void scale(int *values, int count, int factor, int add) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = values[i] * factor + add;
}

__global__ void add_from(const int *from, int *to, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] += from[i];
}

const int COUNT = 3000;
const size_t BYTES = COUNT * sizeof(int);

struct Kernel {
    void *arguments[4];
    cudaKernelNodeParams parameters = {};
    Kernel(int **memory, const int *count, int *factor, int *add) {
        arguments[0] = memory;
        arguments[1] = const_cast<int *>(count);
        arguments[2] = factor;
        arguments[3] = add;
        parameters.func = reinterpret_cast<void *>(scale);
        parameters.gridDim = dim3((COUNT + 127) / 128);
        parameters.blockDim = dim3(128);
        parameters.kernelParams = arguments;
    }
};

static void CUDART_CB increment(void *data) { ++*static_cast<int *>(data); }

int main() {
    int *input, *output, *work, *zeros, calls = 0;
    CHECK(cudaHostAlloc(&input, BYTES, cudaHostAllocDefault));
    CHECK(cudaHostAlloc(&output, BYTES, cudaHostAllocDefault));
    CHECK(cudaMalloc(&work, BYTES));
    CHECK(cudaMalloc(&zeros, BYTES));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    // input -> work -> work * 3 + 1 -> work + zeros (filled by a parallel node) -> output -> host
    // function
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t copy_in, fill, first, second, copy_out, host;
    int factor = 3, add = 1;
    CHECK(cudaGraphAddMemcpyNode1D(&copy_in, graph, nullptr, 0, work, input, BYTES, cudaMemcpyHostToDevice));
    cudaMemsetParams fill_parameters = {};
    fill_parameters.dst = zeros;
    fill_parameters.elementSize = 4;
    fill_parameters.value = 1000;
    fill_parameters.width = COUNT;
    fill_parameters.height = 1;
    CHECK(cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &fill_parameters));
    {
        // A node copies its parameters when it is created: the originals go out of scope here.
        int own_factor = factor, own_add = add;
        Kernel kernel(&work, &COUNT, &own_factor, &own_add);
        CHECK(cudaGraphAddKernelNode(&first, graph, &copy_in, 1, &kernel.parameters));
        own_factor = own_add = -1;
    }
    void *sum_arguments[] = {&zeros, &work, const_cast<int *>(&COUNT)};
    cudaKernelNodeParams sum_parameters = {};
    sum_parameters.func = reinterpret_cast<void *>(add_from);
    sum_parameters.gridDim = dim3((COUNT + 127) / 128);
    sum_parameters.blockDim = dim3(128);
    sum_parameters.kernelParams = sum_arguments;
    cudaGraphNode_t both[] = {first, fill};
    CHECK(cudaGraphAddKernelNode(&second, graph, both, 2, &sum_parameters));
    CHECK(cudaGraphAddMemcpyNode1D(&copy_out, graph, &second, 1, output, work, BYTES, cudaMemcpyDeviceToHost));
    cudaHostNodeParams host_parameters = {};
    host_parameters.fn = increment;
    host_parameters.userData = &calls;
    CHECK(cudaGraphAddHostNode(&host, graph, &copy_out, 1, &host_parameters));

    size_t nodes = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    EXPECT(nodes == 6);
    cudaGraphNodeType type;
    CHECK(cudaGraphNodeGetType(fill, &type));
    EXPECT(type == cudaGraphNodeTypeMemset);
    CHECK(cudaGraphNodeGetType(first, &type));
    EXPECT(type == cudaGraphNodeTypeKernel);
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));

    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < COUNT; i++) input[i] = i + round;
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (int i = 0; i < COUNT; i++) EXPECT(output[i] == (i + round) * 3 + 1 + 1000);
        EXPECT(calls == round + 1);
    }
    std::printf("graphs: built from %zu nodes, replays right\n", nodes);

    // Changes parameters in the executable graph only.
    int new_factor = 7, new_add = -2;
    Kernel changed(&work, &COUNT, &new_factor, &new_add);
    CHECK(cudaGraphExecKernelNodeSetParams(executable, first, &changed.parameters));
    fill_parameters.value = 5;
    CHECK(cudaGraphExecMemsetNodeSetParams(executable, fill, &fill_parameters));
    for (int i = 0; i < COUNT; i++) input[i] = i;
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < COUNT; i++) EXPECT(output[i] == i * 7 - 2 + 5);
    std::printf("graphs: changed parameters right\n");

    // Updates the executable from a graph of the same shape (again the first one); an update from
    // another shape is refused.
    cudaGraphExecUpdateResultInfo info;
    CHECK(cudaGraphExecUpdate(executable, graph, &info));
    EXPECT(info.result == cudaGraphExecUpdateSuccess);
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < COUNT; i++) EXPECT(output[i] == i * 3 + 1 + 1000);
    cudaGraph_t clone;
    CHECK(cudaGraphClone(&clone, graph));
    cudaGraphNode_t extra;
    CHECK(cudaGraphAddEmptyNode(&extra, clone, nullptr, 0));
    SHOW(cudaGraphExecUpdate(executable, clone, &info));
    cudaGetLastError();
    CHECK(cudaGraphDestroy(clone));
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphs: update right\n");

    // A captured graph as a child of another, launched twice in a row without synchronization.
    cudaGraph_t child, parent;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    scale<<<(COUNT + 127) / 128, 128, 0, stream>>>(work, COUNT, 2, 1);
    CHECK(cudaMemsetAsync(zeros, 0, BYTES, stream));
    add_from<<<(COUNT + 127) / 128, 128, 0, stream>>>(work, zeros, COUNT);
    CHECK(cudaStreamEndCapture(stream, &child));
    CHECK(cudaGraphCreate(&parent, 0));
    cudaGraphNode_t before, nested, after;
    CHECK(cudaGraphAddMemcpyNode1D(&before, parent, nullptr, 0, work, input, BYTES, cudaMemcpyHostToDevice));
    CHECK(cudaGraphAddChildGraphNode(&nested, parent, &before, 1, child));
    CHECK(cudaGraphAddMemcpyNode1D(&after, parent, &nested, 1, output, zeros, BYTES, cudaMemcpyDeviceToHost));
    CHECK(cudaGraphInstantiate(&executable, parent, 0));
    CHECK(cudaGraphUpload(executable, stream));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < COUNT; i++) EXPECT(output[i] == i * 2 + 1);
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(parent));
    CHECK(cudaGraphDestroy(child));
    std::printf("graphs: child graph right\n");

    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(work));
    CHECK(cudaFree(zeros));
    CHECK(cudaFreeHost(input));
    CHECK(cudaFreeHost(output));
    return 0;
}

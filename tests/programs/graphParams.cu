// Parameters of nodes, read from the driver: kernels, copies, fills, host functions, events,
// memory, memory operations; the parameters that were read serve for the next setting.
#include "driver.h"

#include <cstring>
#include <vector>

const int COUNT = 1000;

__global__ void add(int *values, int count, int amount) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] += amount;
}

static int called;
static void CUDART_CB call(void *data) { called += *static_cast<int *>(data); }

static std::vector<int> launch(cudaGraph_t graph, cudaStream_t stream, int *device) {
    cudaGraphExec_t executable;
    CHECK(cudaMemset(device, 0, COUNT * sizeof(int)));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGraphExecDestroy(executable));
    std::vector<int> values(COUNT);
    CHECK(cudaMemcpy(values.data(), device, COUNT * sizeof(int), cudaMemcpyDeviceToHost));
    return values;
}

typedef CUresult (*GetKernel)(CUgraphNode, CUDA_KERNEL_NODE_PARAMS_v2 *);
typedef CUresult (*SetKernel)(CUgraphNode, const CUDA_KERNEL_NODE_PARAMS_v2 *);

static void kernels(cudaStream_t stream, int *device) {
    auto get = reinterpret_cast<GetKernel>(driver_symbol("cuGraphKernelNodeGetParams_v2"));
    auto set = reinterpret_cast<SetKernel>(driver_symbol("cuGraphKernelNodeSetParams_v2"));
    cudaGraph_t graph;
    for (int captured = 0; captured < 2; captured++) {
        cudaGraphNode_t node;
        if (captured) {
            size_t one = 1;
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            add<<<8, 128, 256, stream>>>(device, COUNT, 5);
            CHECK(cudaStreamEndCapture(stream, &graph));
            CHECK(cudaGraphGetNodes(graph, &node, &one));
        } else {
            int n = COUNT, amount = 5;
            void *arguments[] = {&device, &n, &amount};
            cudaKernelNodeParams params = {};
            params.func = reinterpret_cast<void *>(add);
            params.gridDim = dim3(8);
            params.blockDim = dim3(128);
            params.sharedMemBytes = 256;
            params.kernelParams = arguments;
            CHECK(cudaGraphCreate(&graph, 0));
            CHECK(cudaGraphAddKernelNode(&node, graph, nullptr, 0, &params));
        }
        CUDA_KERNEL_NODE_PARAMS_v2 params = {};
        CHECK_DRIVER(get(node, &params));
        EXPECT(params.gridDimX == 8 && params.gridDimY == 1 && params.gridDimZ == 1);
        EXPECT(params.blockDimX == 128 && params.blockDimY == 1 && params.blockDimZ == 1);
        EXPECT(params.sharedMemBytes == 256);
        EXPECT(params.func != nullptr || params.kern != nullptr);
        EXPECT(params.kernelParams != nullptr);
        EXPECT(*static_cast<int **>(params.kernelParams[0]) == device);
        EXPECT(*static_cast<int *>(params.kernelParams[1]) == COUNT);
        EXPECT(*static_cast<int *>(params.kernelParams[2]) == 5);
        for (int value : launch(graph, stream, device)) EXPECT(value == 5);
        // The structure that was read, with another argument, is good for a setting.
        int amount = 9;
        void *arguments[] = {params.kernelParams[0], params.kernelParams[1], &amount};
        params.kernelParams = arguments;
        CHECK_DRIVER(set(node, &params));
        for (int value : launch(graph, stream, device)) EXPECT(value == 9);
        CHECK_DRIVER(get(node, &params));
        EXPECT(*static_cast<int *>(params.kernelParams[2]) == 9);
        CHECK(cudaGraphDestroy(graph));
    }
    std::printf("graphParams: kernels right\n");
}

static const char PTX[] = R"(
.version 6.3
.target sm_75
.address_size 64

.visible .global .align 4 .u32 variable = 0;

.visible .entry put(.param .u32 value)
{
    .reg .b32 %r;
    ld.param.u32 %r, [value];
    st.global.u32 [variable], %r;
    ret;
}
)";

typedef CUresult (*ContextCreate)(CUcontext *, unsigned, CUdevice);
typedef CUresult (*AddKernel)(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const CUDA_KERNEL_NODE_PARAMS_v2 *);

// The kernel of a library runs in the context that its node names, else in the current one.
static void contexts() {
    DRIVER(cuCtxGetCurrent);
    DRIVER(cuCtxSetCurrent);
    DRIVER(cuCtxSynchronize);
    DRIVER(cuCtxDestroy);
    DRIVER(cuLibraryLoadData);
    DRIVER(cuLibraryGetKernel);
    DRIVER(cuLibraryGetGlobal);
    DRIVER(cuLibraryUnload);
    DRIVER(cuKernelGetFunction);
    DRIVER(cuGraphLaunch);
    auto create = reinterpret_cast<ContextCreate>(driver_symbol("cuCtxCreate_v2"));
    auto add_kernel = reinterpret_cast<AddKernel>(driver_symbol("cuGraphAddKernelNode_v2"));
    auto get = reinterpret_cast<GetKernel>(driver_symbol("cuGraphKernelNodeGetParams_v2"));
    auto set = reinterpret_cast<SetKernel>(driver_symbol("cuGraphKernelNodeSetParams_v2"));
    CUcontext both[2];
    CUdeviceptr variables[2];
    CUfunction functions[2];
    size_t size;
    CUlibrary library;
    CUkernel kernel;
    CHECK_DRIVER(cuCtxGetCurrent_(&both[0]));
    CHECK_DRIVER(create(&both[1], 0, 0));
    CHECK_DRIVER(cuLibraryLoadData_(&library, PTX, nullptr, nullptr, 0, nullptr, nullptr, 0));
    CHECK_DRIVER(cuLibraryGetKernel_(&kernel, library, "put"));
    for (int i = 0; i < 2; i++) {
        CHECK_DRIVER(cuCtxSetCurrent_(both[i]));
        CHECK_DRIVER(cuLibraryGetGlobal_(&variables[i], &size, library, "variable"));
        CHECK_DRIVER(cuKernelGetFunction_(&functions[i], kernel));
    }
    EXPECT(variables[0] != variables[1]);
    for (int round = 0; round < 4; round++) {
        const int named = round % 2;
        CUcontext current = both[round < 2 ? !named : named];
        CHECK_DRIVER(cuCtxSetCurrent_(current));
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        CUgraphNode node;
        CHECK(cudaGraphCreate(&graph, 0));
        unsigned value = 20 + named;
        void *arguments[] = {&value};
        CUDA_KERNEL_NODE_PARAMS_v2 params = {}, read = {};
        params.gridDimX = params.gridDimY = params.gridDimZ = 1;
        params.blockDimX = params.blockDimY = params.blockDimZ = 1;
        params.kernelParams = arguments;
        params.kern = kernel;
        params.ctx = round < 2 ? both[named] : nullptr;
        CHECK_DRIVER(add_kernel(&node, graph, nullptr, 0, &params));
        CHECK_DRIVER(get(node, &read));
        EXPECT(read.ctx == both[named] && read.kern == kernel && read.func == functions[named]);
        for (int again = 0; again < 2; again++) {
            CHECK(cudaGraphInstantiate(&executable, graph, 0));
            CHECK_DRIVER(cuGraphLaunch_(executable, nullptr));
            CHECK(cudaGraphExecDestroy(executable));
            for (int i = 0; i < 2; i++) {
                CHECK_DRIVER(cuCtxSetCurrent_(both[i]));
                CHECK_DRIVER(cuCtxSynchronize_());
            }
            for (int i = 0; i < 2; i++) {
                CHECK_DRIVER(cuCtxSetCurrent_(both[i]));
                unsigned found, zero = 0;
                CHECK(cudaMemcpy(&found, reinterpret_cast<void *>(variables[i]), sizeof found, cudaMemcpyDeviceToHost));
                EXPECT(found == (i == named ? value : 0));
                CHECK(cudaMemcpy(reinterpret_cast<void *>(variables[i]), &zero, sizeof zero, cudaMemcpyHostToDevice));
                CHECK_DRIVER(cuCtxSynchronize_());
            }
            CHECK_DRIVER(cuCtxSetCurrent_(current));
            value += 10;
            CHECK_DRIVER(set(node, &params));
        }
        CHECK(cudaGraphDestroy(graph));
    }
    CHECK_DRIVER(cuCtxSetCurrent_(both[0]));
    CHECK_DRIVER(cuLibraryUnload_(library));
    CHECK_DRIVER(cuCtxDestroy_(both[1]));
    std::printf("graphParams: contexts right\n");
}

static void copies_and_fills(int *device, int *other) {
    DRIVER(cuGraphAddMemcpyNode);
    DRIVER(cuGraphMemcpyNodeGetParams);
    DRIVER(cuGraphAddMemsetNode);
    DRIVER(cuGraphMemsetNodeGetParams);
    DRIVER(cuCtxGetCurrent);
    CUcontext context;
    CHECK_DRIVER(cuCtxGetCurrent_(&context));
    int *pinned;
    CHECK(cudaMallocHost(&pinned, COUNT * sizeof(int)));
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    for (int from_host = 0; from_host < 2; from_host++) {
        CUDA_MEMCPY3D copy = {}, read = {};
        copy.srcMemoryType = from_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        copy.srcHost = from_host ? pinned : nullptr;
        copy.srcDevice = from_host ? 0 : reinterpret_cast<CUdeviceptr>(other);
        copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.dstDevice = reinterpret_cast<CUdeviceptr>(device);
        copy.WidthInBytes = 400;
        copy.Height = copy.Depth = 1;
        CUgraphNode node;
        CHECK_DRIVER(cuGraphAddMemcpyNode_(&node, graph, nullptr, 0, &copy, context));
        CHECK_DRIVER(cuGraphMemcpyNodeGetParams_(node, &read));
        EXPECT(read.WidthInBytes == 400 && read.Height == 1 && read.Depth == 1);
        EXPECT(read.dstDevice == copy.dstDevice && read.dstXInBytes == 0);
        EXPECT(read.srcMemoryType == copy.srcMemoryType);
        EXPECT(from_host ? read.srcHost == pinned : read.srcDevice == copy.srcDevice);
    }
    CUDA_MEMSET_NODE_PARAMS fill = {}, read = {};
    fill.dst = reinterpret_cast<CUdeviceptr>(device);
    fill.pitch = 512;
    fill.value = 77;
    fill.elementSize = 4;
    fill.width = 20;
    fill.height = 3;
    CUgraphNode node;
    CHECK_DRIVER(cuGraphAddMemsetNode_(&node, graph, nullptr, 0, &fill, context));
    CHECK_DRIVER(cuGraphMemsetNodeGetParams_(node, &read));
    EXPECT(read.dst == fill.dst && read.pitch == 512 && read.value == 77);
    EXPECT(read.elementSize == 4 && read.width == 20 && read.height == 3);
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaFreeHost(pinned));
    std::printf("graphParams: copies and fills right\n");
}

static void functions_and_events(cudaStream_t stream, int *device) {
    cudaGraph_t graph;
    cudaGraphNode_t node;
    static int two = 2, three = 3;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaHostNodeParams host = {};
    host.fn = call;
    host.userData = &two;
    CHECK(cudaGraphAddHostNode(&node, graph, nullptr, 0, &host));
    cudaHostNodeParams read = {};
    CHECK(cudaGraphHostNodeGetParams(node, &read));
    EXPECT(read.fn == call && read.userData == &two);
    read.userData = &three;
    CHECK(cudaGraphHostNodeSetParams(node, &read));
    CHECK(cudaGraphHostNodeGetParams(node, &read));
    EXPECT(read.fn == call && read.userData == &three);
    launch(graph, stream, device);
    EXPECT(called == 3);
    cudaEvent_t one, other, found;
    CHECK(cudaEventCreate(&one));
    CHECK(cudaEventCreate(&other));
    CHECK(cudaGraphAddEventRecordNode(&node, graph, nullptr, 0, one));
    CHECK(cudaGraphEventRecordNodeGetEvent(node, &found));
    EXPECT(found == one);
    CHECK(cudaGraphEventRecordNodeSetEvent(node, other));
    CHECK(cudaGraphEventRecordNodeGetEvent(node, &found));
    EXPECT(found == other);
    cudaGraphNode_t wait;
    CHECK(cudaGraphAddEventWaitNode(&wait, graph, nullptr, 0, one));
    CHECK(cudaGraphEventWaitNodeGetEvent(wait, &found));
    EXPECT(found == one);
    SHOW(cudaGraphEventWaitNodeGetEvent(node, &found));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(one));
    CHECK(cudaEventDestroy(other));
    std::printf("graphParams: functions and events right\n");
}

static void memory(int *device) {
    DRIVER(cuGraphAddBatchMemOpNode);
    DRIVER(cuGraphBatchMemOpNodeGetParams);
    DRIVER(cuCtxGetCurrent);
    cudaGraph_t graph;
    cudaGraphNode_t node;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaMemAllocNodeParams alloc = {}, read = {};
    alloc.poolProps.allocType = cudaMemAllocationTypePinned;
    alloc.poolProps.location.type = cudaMemLocationTypeDevice;
    alloc.bytesize = 1 << 20;
    CHECK(cudaGraphAddMemAllocNode(&node, graph, nullptr, 0, &alloc));
    CHECK(cudaGraphMemAllocNodeGetParams(node, &read));
    EXPECT(read.dptr == alloc.dptr && read.bytesize >= alloc.bytesize);
    EXPECT(read.poolProps.location.type == cudaMemLocationTypeDevice && read.poolProps.location.id == 0);
    CUstreamBatchMemOpParams items[2] = {};
    for (int i = 0; i < 2; i++) {
        items[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        items[i].writeValue.address = reinterpret_cast<CUdeviceptr>(device) + 4 * i;
        items[i].writeValue.value = 10 + i;
    }
    CUDA_BATCH_MEM_OP_NODE_PARAMS params = {}, found = {};
    CHECK_DRIVER(cuCtxGetCurrent_(&params.ctx));
    params.count = 2;
    params.paramArray = items;
    CUgraphNode operations;
    CHECK_DRIVER(cuGraphAddBatchMemOpNode_(&operations, graph, nullptr, 0, &params));
    CHECK_DRIVER(cuGraphBatchMemOpNodeGetParams_(operations, &found));
    EXPECT(found.count == 2 && found.ctx == params.ctx && found.paramArray != nullptr);
    for (int i = 0; i < 2; i++) {
        EXPECT(found.paramArray[i].writeValue.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32);
        EXPECT(found.paramArray[i].writeValue.address == items[i].writeValue.address);
        EXPECT(found.paramArray[i].writeValue.value == unsigned(10 + i));
    }
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphParams: memory right\n");
}

typedef CUresult (*AddNode)(CUgraphNode *, CUgraph, const CUgraphNode *, const void *, size_t, CUgraphNodeParams *);
typedef CUresult (*SetNode)(CUgraphNode, CUgraphNodeParams *);

// Calls of CUDA 13.4, which older drivers do not have.
static void calls_of_13_4(cudaStream_t stream, int *device) {
    DRIVER(cuCtxGetCurrent);
    auto add = reinterpret_cast<AddNode>(driver_symbol_if("cuGraphAddNode_v3"));
    auto set = reinterpret_cast<SetNode>(driver_symbol_if("cuGraphNodeSetParams_v2"));
    cudaGraph_t graph;
    CUgraphNode node;
    CHECK(cudaGraphCreate(&graph, 0));
    CUgraphNodeParams params = {};
    params.type = CU_GRAPH_NODE_TYPE_MEMSET;
    params.memset.dst = reinterpret_cast<CUdeviceptr>(device);
    params.memset.value = 31;
    params.memset.elementSize = 4;
    params.memset.width = COUNT;
    params.memset.height = 1;
    CHECK_DRIVER(cuCtxGetCurrent_(&params.memset.ctx));
    CUresult added = add && set ? add(&node, graph, nullptr, nullptr, 0, &params) : CUDA_ERROR_NOT_SUPPORTED;
    if (added != CUDA_ERROR_NOT_SUPPORTED) {
        CHECK_DRIVER(added);
        for (int value : launch(graph, stream, device)) EXPECT(value == 31);
        params.memset.value = 32;
        CHECK_DRIVER(set(node, &params));
        for (int value : launch(graph, stream, device)) EXPECT(value == 32);
    }
    CHECK(cudaGraphDestroy(graph));
    std::printf("graphParams: calls of CUDA 13.4 right\n");
}

int main() {
    int *device, *other;
    cudaStream_t stream;
    CHECK(cudaMalloc(&device, COUNT * sizeof *device));
    CHECK(cudaMalloc(&other, COUNT * sizeof *other));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    kernels(stream, device);
    contexts();
    copies_and_fills(device, other);
    functions_and_events(stream, device);
    memory(device);
    calls_of_13_4(stream, device);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(other));
    CHECK(cudaFree(device));
    return 0;
}

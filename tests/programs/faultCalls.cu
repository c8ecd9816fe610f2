// Statuses of driver calls after a kernel has failed, after a reset of the device behind that, and
// after a reset or the last release of the primary context alone.
#include "driver.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

__global__ void fail(int *nowhere) { *nowhere = 1; }

#define S(name, ...) show(#name, (int)((decltype(&name))driver_symbol(DRIVER_TEXT(name)))(__VA_ARGS__))

static void show(const char *name, int status) { std::printf("%-44s %d\n", name, status); }

static void CUDA_CB host(void *) {}

struct Objects {
    CUcontext ctx;
    CUdeviceptr memory, async_memory;
    void *pinned;
    CUstream stream;
    CUevent event, late;
    CUmodule module;
    CUfunction function;
    CUgraph graph;
    CUgraphNode node;
    CUgraphExec exec;
    CUarray array;
    CUmemoryPool pool;
    CUdeviceptr reserved;
    CUmemGenericAllocationHandle handle;
};

static void queries(Objects &o) {
    size_t a = 0, b = 0;
    int n = 0, m = 0;
    unsigned u = 0;
    float f = 0;
    CUcontext ctx = nullptr;
    CUdevice device = 0;
    CUdeviceptr p = 0;
    unsigned long long id = 0;
    CUstreamCaptureStatus capture;
    CUlimit limit = CU_LIMIT_STACK_SIZE;
    CUfunc_cache cache;
    S(cuCtxGetCurrent, &ctx);
    S(cuCtxGetDevice, &device);
    S(cuCtxGetFlags, &u);
    S(cuCtxGetId, o.ctx, &id);
    S(cuCtxGetApiVersion, o.ctx, &u);
    S(cuCtxGetLimit, &a, limit);
    S(cuCtxSetLimit, limit, 2048);
    S(cuCtxGetCacheConfig, &cache);
    S(cuCtxGetStreamPriorityRange, &n, &m);
    S(cuDevicePrimaryCtxGetState, 0, &u, &n);
    std::printf("active %d\n", n);
    S(cuDeviceGetAttribute, &n, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0);
    S(cuDeviceTotalMem_v2, &a, 0);
    S(cuMemGetInfo_v2, &a, &b);
    S(cuMemGetAddressRange_v2, &p, &a, o.memory);
    S(cuPointerGetAttribute, &u, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, o.memory);
    S(cuMemHostGetDevicePointer_v2, &p, o.pinned, 0);
    S(cuMemHostGetFlags, &u, o.pinned);
    S(cuStreamGetFlags, o.stream, &u);
    S(cuStreamGetPriority, o.stream, &n);
    S(cuStreamGetId, o.stream, &id);
    S(cuStreamIsCapturing, o.stream, &capture);
    S(cuStreamQuery, o.stream);
    S(cuEventQuery, o.event);
    S(cuEventElapsedTime, &f, o.event, o.late);
    S(cuModuleGetFunction, &o.function, o.module, "nothing");
    S(cuModuleGetGlobal_v2, &p, &a, o.module, "variable");
    S(cuFuncGetAttribute, &n, CU_FUNC_ATTRIBUTE_NUM_REGS, o.function);
    S(cuFuncSetAttribute, o.function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 0);
    S(cuFuncSetCacheConfig, o.function, CU_FUNC_CACHE_PREFER_NONE);
    S(cuOccupancyMaxActiveBlocksPerMultiprocessor, &n, o.function, 32, 0);
    S(cuGraphGetNodes, o.graph, nullptr, &a);
    S(cuMemPoolGetAttribute, o.pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &id);
    CUDA_ARRAY_DESCRIPTOR described;
    S(cuArrayGetDescriptor_v2, &described, o.array);
}

static void work(Objects &o) {
    CUdeviceptr p = 0;
    void *host_memory = nullptr;
    static int words[1024];
    CUstream stream = nullptr;
    CUevent event = nullptr;
    CUgraph graph = nullptr;
    CUgraphNode node = nullptr;
    CUgraphExec exec = nullptr;
    CUmodule module = nullptr;
    CUarray array = nullptr;
    CUmemoryPool pool = nullptr;
    CUmemGenericAllocationHandle handle = 0;
    size_t pitch = 0;
    S(cuCtxSynchronize);
    S(cuStreamSynchronize, o.stream);
    S(cuStreamSynchronize, nullptr);
    S(cuEventSynchronize, o.event);
    S(cuMemAlloc_v2, &p, 4);
    S(cuMemAllocPitch_v2, &p, &pitch, 64, 2, 4);
    S(cuMemAllocAsync, &p, 4, o.stream);
    S(cuMemAllocManaged, &p, 4, CU_MEM_ATTACH_GLOBAL);
    S(cuMemHostAlloc, &host_memory, 4, 0);
    S(cuMemHostRegister_v2, words, sizeof words, 0);
    S(cuMemcpyHtoD_v2, o.memory, words, 4);
    S(cuMemcpyDtoH_v2, words, o.memory, 4);
    S(cuMemcpyHtoDAsync_v2, o.memory, o.pinned, 4, o.stream);
    S(cuMemcpyDtoHAsync_v2, o.pinned, o.memory, 4, o.stream);
    S(cuMemcpyDtoDAsync_v2, o.memory, o.memory + 4, 4, o.stream);
    S(cuMemcpyAsync, o.memory, o.memory + 4, 4, o.stream);
    S(cuMemsetD32_v2, o.memory, 0, 1);
    S(cuMemsetD8Async, o.memory, 0, 1, o.stream);
    S(cuLaunchKernel, o.function, 1, 1, 1, 1, 1, 1, 0, o.stream, nullptr, nullptr);
    S(cuLaunchHostFunc, o.stream, host, nullptr);
    S(cuEventRecord, o.event, o.stream);
    S(cuStreamWaitEvent, o.stream, o.event, 0);
    S(cuGraphLaunch, o.exec, o.stream);
    S(cuGraphUpload, o.exec, o.stream);
    S(cuStreamCreate, &stream, 0);
    S(cuStreamCreateWithPriority, &stream, 0, 0);
    S(cuEventCreate, &event, 0);
    S(cuGraphCreate, &graph, 0);
    S(cuGraphAddEmptyNode, &node, o.graph, nullptr, 0);
    S(cuGraphInstantiateWithFlags, &exec, o.graph, 0);
    S(cuGraphClone, &graph, o.graph);
    S(cuStreamBeginCapture_v2, o.stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    S(cuStreamEndCapture, o.stream, &graph);
    CUDA_ARRAY_DESCRIPTOR of_array = {16, 16, CU_AD_FORMAT_FLOAT, 1};
    S(cuArrayCreate_v2, &array, &of_array);
    CUmemPoolProps of_pool = {};
    of_pool.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    of_pool.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    S(cuMemPoolCreate, &pool, &of_pool);
    S(cuMemPoolTrimTo, o.pool, 0);
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    S(cuMemCreate, &handle, 2 << 20, &prop, 0);
    S(cuMemAddressReserve, &p, 2 << 20, 0, 0, 0);
    S(cuMemMap, o.reserved, 2 << 20, 0, o.handle, 0);
    S(cuModuleLoadData, &module, ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry other() { ret; }\n");
}

static void ends(Objects &o, bool released) {
    S(cuMemFree_v2, o.memory);
    S(cuMemFreeAsync, o.async_memory, o.stream);
    S(cuMemFreeHost, o.pinned);
    S(cuGraphExecDestroy, o.exec);
    S(cuGraphDestroyNode, o.node);
    S(cuGraphDestroy, o.graph);
    S(cuModuleUnload, o.module);
    // Behind the last release the driver returns 201 or 709 natively.
    if (!released) S(cuEventDestroy_v2, o.event);
    S(cuStreamDestroy_v2, o.stream);
    S(cuArrayDestroy, o.array);
    S(cuMemPoolDestroy, o.pool);
    S(cuMemRelease, o.handle);
    S(cuMemAddressFree, o.reserved, 2 << 20);
}

static Objects prepare() {
    Objects o = {};
    CHECK(cudaFree(nullptr));
#define MUST(call) EXPECT((call) == CUDA_SUCCESS)
#define F(name) ((decltype(&name))driver_symbol(DRIVER_TEXT(name)))
    MUST(F(cuCtxGetCurrent)(&o.ctx));
    MUST(F(cuMemAlloc_v2)(&o.memory, 64));
    MUST(F(cuMemHostAlloc)(&o.pinned, 64, 0));
    MUST(F(cuStreamCreate)(&o.stream, CU_STREAM_NON_BLOCKING));
    MUST(F(cuMemAllocAsync)(&o.async_memory, 64, o.stream));
    MUST(F(cuEventCreate)(&o.event, 0));
    MUST(F(cuEventCreate)(&o.late, 0));
    MUST(F(cuEventRecord)(o.event, o.stream));
    MUST(F(cuEventRecord)(o.late, o.stream));
    MUST(F(cuModuleLoadData)(&o.module, ".version 7.0\n.target sm_70\n.address_size 64\n.visible .global .u32 variable;\n.visible .entry nothing() { ret; }\n"));
    MUST(F(cuModuleGetFunction)(&o.function, o.module, "nothing"));
    MUST(F(cuGraphCreate)(&o.graph, 0));
    MUST(F(cuGraphAddEmptyNode)(&o.node, o.graph, nullptr, 0));
    MUST(F(cuGraphInstantiateWithFlags)(&o.exec, o.graph, 0));
    CUDA_ARRAY_DESCRIPTOR of_array = {16, 16, CU_AD_FORMAT_FLOAT, 1};
    MUST(F(cuArrayCreate_v2)(&o.array, &of_array));
    CUmemPoolProps of_pool = {};
    of_pool.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    of_pool.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    MUST(F(cuMemPoolCreate)(&o.pool, &of_pool));
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    MUST(F(cuMemCreate)(&o.handle, 2 << 20, &prop, 0));
    MUST(F(cuMemAddressReserve)(&o.reserved, 2 << 20, 0, 0, 0));
    CHECK(cudaDeviceSynchronize());
    return o;
}

static int calls(bool fails, bool resets, bool releases) {
    Objects o = prepare();
    if (fails) fail<<<1, 1>>>(nullptr);
    S(cuCtxSynchronize);
    if (releases) S(cuDevicePrimaryCtxRelease_v2, 0);
    if (resets) S(cuDevicePrimaryCtxReset_v2, 0);
    std::printf("- queries\n");
    queries(o);
    std::printf("- work\n");
    work(o);
    std::printf("- ends\n");
    ends(o, releases);
    std::printf("- contexts\n");
    CUcontext other = nullptr, gone = nullptr;
    S(cuDevicePrimaryCtxRetain, &other, 0);
    S(cuCtxSetCurrent, o.ctx);
    S(cuCtxPushCurrent_v2, o.ctx);
    S(cuCtxPopCurrent_v2, &gone);
    // Newer headers do not declare this form.
    using Create = CUresult (*)(CUcontext *, unsigned, CUdevice);
    show("cuCtxCreate_v2", int(Create(driver_symbol("cuCtxCreate_v2"))(&gone, 0, 0)));
    if (!resets && !releases) S(cuDevicePrimaryCtxReset_v2, 0);
    S(cuCtxSynchronize);
    S(cuDevicePrimaryCtxRelease_v2, 0);
    S(cuDevicePrimaryCtxRelease_v2, 0);
    S(cuDevicePrimaryCtxRelease_v2, 0);
    S(cuDevicePrimaryCtxRetain, &other, 0);
    return 0;
}

int main(int argc, char **argv) {
    const auto is = [&](const char *part) { return std::strcmp(argv[1], part) == 0; };
    if (argc > 1) return calls(is("fault") || is("reset"), is("reset") || is("plain"), is("release"));
    for (const char *part : {"fault", "reset", "plain", "release"}) {
        // A program with this runtime crashed natively.
        if (CUDART_VERSION < 13000 && std::strcmp(part, "fault") != 0) continue;
        std::printf("== %s\n", part);
        std::fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            execl("/proc/self/exe", argv[0], part, nullptr);
            _exit(1);
        }
        int status = 1;
        EXPECT(waitpid(child, &status, 0) == child && status == 0);
    }
    return 0;
}

// Statuses of calls that take an address of the host, of no memory, or beyond an allocation, in the
// place of a device address; and whether bytes changed.
#include "driver.h"

#include <cstdlib>
#include <cstring>

static const size_t BYTES = 4096, SIZE = 2 << 20;

#define F(name) ((decltype(&name))driver_symbol(DRIVER_TEXT(name)))
#define S(name, ...) show(#name, int(F(name)(__VA_ARGS__)))

static unsigned char *heap, *pinned;
static CUdeviceptr device;
static CUstream stream;
static CUcontext context;

static void show(const char *name, int status) {
    F(cuCtxSynchronize)();
    std::printf("%-28s %3d  heap %02x\n", name, status, heap[BYTES / 2]);
    std::memset(heap, 0x11, SIZE);
    std::fflush(stdout);
}

static void plain(CUdeviceptr at) {
    static unsigned char own[BYTES];
    std::memset(own, 0x77, BYTES);
    S(cuMemcpyHtoD_v2, at, own, BYTES);
    S(cuMemcpyHtoDAsync_v2, at, pinned, BYTES, stream);
    S(cuMemcpyDtoH_v2, own, at, BYTES);
    S(cuMemcpyDtoHAsync_v2, pinned, at, BYTES, stream);
    S(cuMemcpyDtoD_v2, at, device, BYTES);
    S(cuMemcpyDtoD_v2, device, at, BYTES);
    S(cuMemcpyDtoDAsync_v2, at, device, BYTES, stream);
    S(cuMemcpyDtoDAsync_v2, device, at, BYTES, stream);
    S(cuMemcpyPeer, at, context, device, context, BYTES);
    S(cuMemcpyPeerAsync, device, context, at, context, BYTES, stream);
    S(cuMemsetD8_v2, at, 0x22, BYTES);
    S(cuMemsetD32_v2, at, 0x22222222, BYTES / 4);
    S(cuMemsetD8Async, at, 0x22, BYTES, stream);
    S(cuMemsetD2D8_v2, at, 64, 0x22, 32, BYTES / 64);
    CUDA_MEMCPY2D box = {};
    box.srcMemoryType = box.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    box.srcDevice = device;
    box.dstDevice = at;
    box.WidthInBytes = box.srcPitch = box.dstPitch = 64;
    box.Height = BYTES / 64;
    S(cuMemcpy2D_v2, &box);
    S(cuMemcpy2DAsync_v2, &box, stream);
    std::swap(box.srcDevice, box.dstDevice);
    S(cuMemcpy2DUnaligned_v2, &box);
    S(cuStreamWriteValue32_v2, stream, at, 0x22222222, 0);
}

static void unified(CUdeviceptr at) {
    S(cuMemcpy, at, device, BYTES);
    S(cuMemcpy, device, at, BYTES);
    S(cuMemcpyAsync, at, device, BYTES, stream);
    CUDA_MEMCPY2D box = {};
    box.srcMemoryType = box.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
    box.srcDevice = device;
    box.dstDevice = at;
    box.WidthInBytes = box.srcPitch = box.dstPitch = 64;
    box.Height = BYTES / 64;
    S(cuMemcpy2D_v2, &box);
}

static void graphs(CUdeviceptr at, size_t len) {
    CUgraph graph;
    CUgraphNode node;
    CUgraphExec exec;
    CHECK_DRIVER(F(cuGraphCreate)(&graph, 0));
    CUDA_MEMSET_NODE_PARAMS fill = {};
    fill.dst = at;
    fill.value = 0x22;
    fill.elementSize = 1;
    fill.width = len;
    fill.height = 1;
    int added = int(F(cuGraphAddMemsetNode)(&node, graph, nullptr, 0, &fill, context));
    show("cuGraphAddMemsetNode", added);
    if (added == 0) {
        int made = int(F(cuGraphInstantiateWithFlags)(&exec, graph, 0));
        show("cuGraphInstantiate", made);
        if (made == 0) S(cuGraphLaunch, exec, stream);
    }
    CHECK_DRIVER(F(cuGraphCreate)(&graph, 0));
    CUDA_MEMCPY3D copy = {};
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = device;
    copy.dstDevice = at;
    copy.WidthInBytes = copy.srcPitch = copy.dstPitch = len;
    copy.Height = copy.srcHeight = copy.dstHeight = copy.Depth = 1;
    added = int(F(cuGraphAddMemcpyNode)(&node, graph, nullptr, 0, &copy, context));
    show("cuGraphAddMemcpyNode", added);
    if (added == 0) {
        int made = int(F(cuGraphInstantiateWithFlags)(&exec, graph, 0));
        show("cuGraphInstantiate", made);
        if (made == 0) S(cuGraphLaunch, exec, stream);
    }
}

static void queries(CUdeviceptr at) {
    CUdeviceptr base = 0;
    size_t size = 0;
    unsigned flags = 0;
    unsigned long long word = 0;
    S(cuMemGetAddressRange_v2, &base, &size, at);
    S(cuPointerGetAttribute, &flags, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at);
    S(cuPointerGetAttribute, &word, CU_POINTER_ATTRIBUTE_CONTEXT, at);
    S(cuPointerGetAttribute, &word, CU_POINTER_ATTRIBUTE_BUFFER_ID, at);
    S(cuPointerGetAttribute, &word, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, at);
    flags = 1;
    S(cuPointerSetAttribute, &flags, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, at);
    S(cuMemHostGetDevicePointer_v2, &base, (void *)at, 0);
    S(cuMemHostGetFlags, &flags, (void *)at);
    S(cuMemHostUnregister, (void *)at);
    S(cuMemFree_v2, at);
    S(cuMemFreeAsync, at, stream);
    S(cuMemUnmap, at, SIZE);
    S(cuMemAddressFree, at, SIZE);
    S(cuMemFreeHost, (void *)at);
}

static void all(const char *what, CUdeviceptr at) {
    std::printf("== %s\n", what);
    plain(at);
    // Elsewhere the driver copies as `memcpy` does, and faults.
    if (at == CUdeviceptr(heap)) unified(at);
    graphs(at, BYTES);
    queries(at);
}

// Calls about `len` bytes at `at`, which may lie beyond what the program allocated there.
static void part(const char *what, CUdeviceptr at, size_t len) {
    std::printf("== %s\n", what);
    static unsigned char own[BYTES];
    S(cuMemcpyHtoD_v2, at, own, len);
    S(cuMemcpyHtoDAsync_v2, at, pinned, len, stream);
    S(cuMemcpyDtoH_v2, own, at, len);
    S(cuMemcpyDtoHAsync_v2, pinned, at, len, stream);
    S(cuMemcpyDtoD_v2, at, device, len);
    S(cuMemcpyDtoD_v2, device, at, len);
    S(cuMemcpyDtoDAsync_v2, at, device, len, stream);
    S(cuMemcpyDtoDAsync_v2, device, at, len, stream);
    S(cuMemcpyPeerAsync, device, context, at, context, len, stream);
    // Of no memory the driver copies as `memcpy` does, and faults.
    unsigned kind = 0;
    if (F(cuPointerGetAttribute)(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at) == CUDA_SUCCESS) {
        S(cuMemcpy, at, device, len);
        S(cuMemcpy, device, at, len);
        S(cuMemcpyAsync, at, device, len, stream);
    }
    S(cuMemsetD8_v2, at, 0, len);
    S(cuMemsetD32Async, at, 0, len / 4, stream);
    S(cuMemsetD2D8_v2, at, len, 0, len, 1);
    S(cuMemsetD2D8Async, at, 4, 0, 4, len / 4, stream);
    CUDA_MEMCPY2D box = {};
    box.srcMemoryType = box.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    box.srcDevice = device;
    box.dstDevice = at;
    box.WidthInBytes = box.srcPitch = box.dstPitch = len;
    box.Height = 1;
    S(cuMemcpy2D_v2, &box);
    box.WidthInBytes = box.srcPitch = box.dstPitch = 4;
    box.Height = len / 4;
    S(cuMemcpy2DAsync_v2, &box, stream);
    std::swap(box.srcDevice, box.dstDevice);
    S(cuMemcpy2DUnaligned_v2, &box);
    box.dstMemoryType = CU_MEMORYTYPE_HOST;
    box.dstHost = own;
    S(cuMemcpy2D_v2, &box);
    CUDA_MEMCPY3D cuboid = {};
    cuboid.srcMemoryType = CU_MEMORYTYPE_HOST;
    cuboid.srcHost = own;
    cuboid.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    cuboid.dstDevice = at;
    cuboid.WidthInBytes = cuboid.srcPitch = cuboid.dstPitch = len;
    cuboid.Height = cuboid.srcHeight = cuboid.dstHeight = cuboid.Depth = 1;
    S(cuMemcpy3D_v2, &cuboid);
    S(cuMemcpy3DAsync_v2, &cuboid, stream);
    graphs(at, len);
}

static void beyond() {
    static unsigned char own[BYTES];
    CUdeviceptr small, pool, managed, reserved;
    unsigned char *few;
    CHECK_DRIVER(F(cuMemAlloc_v2)(&small, 1000));
    part("device: inside", small + 992, 8);
    part("device: beyond", small + 996, 8);
    part("device: beyond, 2 MiB", device + SIZE - 4, 8);
    part("device: far beyond", small, 1 << 20);
    CHECK_DRIVER(F(cuMemAllocAsync)(&pool, 1000, stream));
    CHECK_DRIVER(F(cuStreamSynchronize)(stream));
    part("pool: beyond", pool + 996, 8);
    part("pool: far beyond", pool, 1 << 20);
    CHECK_DRIVER(F(cuMemAllocManaged)(&managed, 1000, CU_MEM_ATTACH_GLOBAL));
    part("managed: beyond", managed + 996, 8);
    CHECK_DRIVER(F(cuMemHostAlloc)((void **)&few, 1000, 0));
    part("pinned: beyond", CUdeviceptr(few) + 996, 8);
    CHECK_DRIVER(F(cuMemHostRegister_v2)(heap, BYTES, 0));
    part("registered: beyond", CUdeviceptr(heap) + BYTES - 4, 8);
    CHECK_DRIVER(F(cuMemHostRegister_v2)(heap + SIZE / 2 + 100, 1000, 0));
    part("registered part of a page: before", CUdeviceptr(heap) + SIZE / 2 + 96, 8);
    part("registered part of a page: beyond", CUdeviceptr(heap) + SIZE / 2 + 1096, 8);
    part("registered part of a page: beyond the page", CUdeviceptr(heap) + SIZE / 2 + BYTES - 4, 8);
    std::printf("== pinned and registered memory of the host: beyond\n");
    S(cuMemcpyHtoD_v2, device, heap + SIZE / 2 + 96, 8);
    S(cuMemcpyHtoD_v2, device, heap + SIZE / 2 + 1096, 8);
    S(cuMemcpyHtoDAsync_v2, device, heap + SIZE / 2 + 96, 8, stream);
    S(cuMemcpyHtoDAsync_v2, device, heap + SIZE / 2 + 1096, 8, stream);
    S(cuMemcpyDtoH_v2, heap + SIZE / 2 + 1096, device, 8);
    S(cuMemcpyHtoD_v2, device, heap + SIZE / 2 + BYTES - 4, 8);
    S(cuMemcpyHtoDAsync_v2, device, heap + SIZE / 2 + BYTES - 4, 8, stream);
    S(cuMemcpyHtoD_v2, device, heap, SIZE);
    CHECK_DRIVER(F(cuMemHostUnregister)(heap + SIZE / 2 + 100));
    S(cuMemcpyHtoD_v2, device, few + 996, 8);
    S(cuMemcpyHtoDAsync_v2, device, few + 996, 8, stream);
    S(cuMemcpyDtoH_v2, few + 996, device, 8);
    S(cuMemcpyDtoHAsync_v2, few + 996, device, 8, stream);
    S(cuMemcpyHtoD_v2, device, heap + BYTES - 4, 8);
    S(cuMemcpyHtoDAsync_v2, device, heap + BYTES - 4, 8, stream);
    S(cuMemcpyDtoH_v2, heap + BYTES - 4, device, 8);
    S(cuMemcpyDtoHAsync_v2, heap + BYTES - 4, device, 8, stream);
    CHECK_DRIVER(F(cuMemHostUnregister)(heap));
    CUmodule module;
    CUdeviceptr variable;
    size_t bytes;
    CHECK_DRIVER(F(cuModuleLoadData)(&module, ".version 7.0\n.target sm_70\n.address_size 64\n.visible .global .u32 variable[10];\n"));
    CHECK_DRIVER(F(cuModuleGetGlobal_v2)(&variable, &bytes, module, "variable"));
    part("variable: beyond", variable + 36, 8);
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CHECK_DRIVER(F(cuMemAddressReserve)(&reserved, 4 * SIZE, 0, 0, 0));
    for (int i = 0; i < 2; ++i) {
        CUmemGenericAllocationHandle handle;
        CHECK_DRIVER(F(cuMemCreate)(&handle, SIZE, &prop, 0));
        CHECK_DRIVER(F(cuMemMap)(reserved + i * SIZE, SIZE, 0, handle, 0));
    }
    part("mapped without access", reserved, 8);
    CHECK_DRIVER(F(cuMemSetAccess)(reserved, 2 * SIZE, &access, 1));
    part("mapped: across", reserved + SIZE - 4, 8);
    part("mapped: beyond", reserved + 2 * SIZE - 4, 8);
    part("reserved", reserved + 3 * SIZE, 8);
    std::printf("== no bytes, and what is freed\n");
    S(cuMemcpyHtoD_v2, device, own, 0);
    S(cuMemcpyHtoD_v2, 0, own, 0);
    S(cuMemcpyHtoD_v2, small + 1000, own, 0);
    S(cuMemsetD8_v2, 0, 0, 0);
    S(cuMemsetD8_v2, small + 1000, 0, 0);
    S(cuMemFree_v2, small + 4);
    S(cuMemFree_v2, small);
    S(cuMemFree_v2, small);
    S(cuMemcpyDtoH_v2, own, small, 4);
    S(cuMemsetD8_v2, small, 0, 4);
    S(cuMemFree_v2, 0);
    S(cuMemFreeAsync, pool, stream);
    S(cuMemcpyDtoHAsync_v2, pinned, pool, 4, stream);
    S(cuMemFree_v2, managed);
    S(cuMemFreeHost, few);
    S(cuMemcpyDtoH_v2, own, managed, 4);
}

int main() {
    CHECK(cudaFree(nullptr));
    heap = static_cast<unsigned char *>(std::aligned_alloc(SIZE, SIZE));
    std::memset(heap, 0x11, SIZE);
    CHECK_DRIVER(F(cuCtxGetCurrent)(&context));
    CHECK_DRIVER(F(cuMemHostAlloc)((void **)&pinned, SIZE, 0));
    std::memset(pinned, 0x33, SIZE);
    CHECK_DRIVER(F(cuMemAlloc_v2)(&device, SIZE));
    CHECK_DRIVER(F(cuMemsetD8_v2)(device, 0x55, SIZE));
    CHECK_DRIVER(F(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING));
    beyond();
    all("no memory", 0x4141414141000);
    all("no address", 0x4141414141414000);
    all("heap", CUdeviceptr(heap));
    S(cuCtxSynchronize);
    std::free(heap);
    return 0;
}

// Settings and names of contexts and devices: old and new forms of their creation, flags, limits,
// caches, primary contexts, the profiler's switches, the lookup of functions.
// Old calls without a warning.
#define CUDA_ENABLE_DEPRECATED
#include "driver.h"

#include <cstring>

typedef CUresult (*OldCreate)(CUcontext *, unsigned, CUdevice);

static void created(CUdevice device) {
    DRIVER(cuCtxDestroy);
    DRIVER(cuCtxGetCurrent);
    DRIVER(cuCtxGetFlags);
    DRIVER(cuCtxSetFlags);
    DRIVER(cuCtxGetId);
    DRIVER(cuCtxGetDevice);
    DRIVER(cuCtxPopCurrent);
    DRIVER(cuCtxPushCurrent);
    auto plain = reinterpret_cast<OldCreate>(driver_symbol("cuCtxCreate"));
    auto second = reinterpret_cast<OldCreate>(driver_symbol("cuCtxCreate_v2"));
    CUcontext contexts[2], current;
    // Beside a context of the first form, the driver makes no other one.
    CHECK_DRIVER(plain(&current, CU_CTX_SCHED_SPIN, device));
    CHECK_DRIVER(cuCtxDestroy_(current));
    CHECK_DRIVER(second(&contexts[0], CU_CTX_SCHED_SPIN, device));
    CHECK_DRIVER(second(&contexts[1], CU_CTX_SCHED_YIELD, device));
    CHECK_DRIVER(cuCtxGetCurrent_(&current));
    EXPECT(current == contexts[1]);
    unsigned flags = 99;
    CHECK_DRIVER(cuCtxGetFlags_(&flags));
    std::printf("yield: flags %#x\n", flags & CU_CTX_SCHED_MASK);
    CHECK_DRIVER(cuCtxSetFlags_(CU_CTX_SCHED_BLOCKING_SYNC));
    CHECK_DRIVER(cuCtxGetFlags_(&flags));
    std::printf("blocking: flags %#x\n", flags & CU_CTX_SCHED_MASK);
    SHOW_DRIVER(cuCtxSetFlags_(0x1000));
    unsigned long long ids[2], again;
    for (int i = 0; i < 2; i++) CHECK_DRIVER(cuCtxGetId_(contexts[i], &ids[i]));
    CHECK_DRIVER(cuCtxGetId_(nullptr, &again));
    EXPECT(ids[0] != ids[1] && again == ids[1]);
    CUdevice of;
    CHECK_DRIVER(cuCtxGetDevice_(&of));
    EXPECT(of == device);
    CHECK_DRIVER(cuCtxPopCurrent_(&current));
    EXPECT(current == contexts[1]);
    CHECK_DRIVER(cuCtxGetFlags_(&flags));
    std::printf("spin: flags %#x\n", flags & CU_CTX_SCHED_MASK);
    CHECK_DRIVER(cuCtxDestroy_(contexts[0]));
    CHECK_DRIVER(cuCtxPushCurrent_(contexts[1]));
    CHECK_DRIVER(cuCtxDestroy_(contexts[1]));
    SHOW_DRIVER(cuCtxGetFlags_(&flags));
}

static void settings() {
    DRIVER(cuCtxGetCacheConfig);
    DRIVER(cuCtxSetCacheConfig);
    DRIVER(cuCtxGetSharedMemConfig);
    DRIVER(cuCtxSetSharedMemConfig);
    DRIVER(cuCtxGetLimit);
    DRIVER(cuCtxSetLimit);
    DRIVER(cuCtxResetPersistingL2Cache);
    DRIVER(cuCtxGetCurrent);
    DRIVER(cuCtxEnablePeerAccess);
    DRIVER(cuCtxDisablePeerAccess);
    DRIVER(cuCtxSynchronize);
    CUfunc_cache cache;
    CHECK_DRIVER(cuCtxSetCacheConfig_(CU_FUNC_CACHE_PREFER_L1));
    CHECK_DRIVER(cuCtxGetCacheConfig_(&cache));
    // Devices without this choice return none.
    EXPECT(cache == CU_FUNC_CACHE_PREFER_L1 || cache == CU_FUNC_CACHE_PREFER_NONE);
    SHOW_DRIVER(cuCtxSetCacheConfig_(CUfunc_cache(9)));
    CUsharedconfig shared;
    SHOW_DRIVER(cuCtxSetSharedMemConfig_(CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE));
    CHECK_DRIVER(cuCtxGetSharedMemConfig_(&shared));
    std::printf("banks %d\n", int(shared));
    size_t value;
    CHECK_DRIVER(cuCtxSetLimit_(CU_LIMIT_STACK_SIZE, 4096));
    CHECK_DRIVER(cuCtxGetLimit_(&value, CU_LIMIT_STACK_SIZE));
    std::printf("stack %zu\n", value);
    CHECK_DRIVER(cuCtxSetLimit_(CU_LIMIT_PRINTF_FIFO_SIZE, 4 << 20));
    CHECK_DRIVER(cuCtxGetLimit_(&value, CU_LIMIT_PRINTF_FIFO_SIZE));
    EXPECT(value >= 4 << 20);
    SHOW_DRIVER(cuCtxSetLimit_(CUlimit(99), 1));
    SHOW_DRIVER(cuCtxGetLimit_(&value, CUlimit(99)));
    SHOW_DRIVER(cuCtxResetPersistingL2Cache_());
    CUcontext current;
    CHECK_DRIVER(cuCtxGetCurrent_(&current));
    SHOW_DRIVER(cuCtxEnablePeerAccess_(current, 0));
    SHOW_DRIVER(cuCtxEnablePeerAccess_(current, 1));
    SHOW_DRIVER(cuCtxDisablePeerAccess_(current));
    CHECK_DRIVER(cuCtxSynchronize_());
}

static void devices(CUdevice device) {
    DRIVER(cuDeviceComputeCapability);
    DRIVER(cuDeviceGetProperties);
    DRIVER(cuDeviceGetLuid);
    DRIVER(cuDeviceGetAttribute);
    int major = 0, minor = 0, same = 0;
    CHECK_DRIVER(cuDeviceComputeCapability_(&major, &minor, device));
    CHECK_DRIVER(cuDeviceGetAttribute_(&same, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
    EXPECT(major == same);
    CHECK_DRIVER(cuDeviceGetAttribute_(&same, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
    EXPECT(minor == same);
    CUdevprop properties;
    CHECK_DRIVER(cuDeviceGetProperties_(&properties, device));
    std::printf("properties: %d threads, %d %d %d, warps of %d\n", properties.maxThreadsPerBlock,
                properties.maxThreadsDim[0], properties.maxThreadsDim[1], properties.maxThreadsDim[2],
                properties.SIMDWidth);
    CHECK_DRIVER(cuDeviceGetAttribute_(&same, CU_DEVICE_ATTRIBUTE_CLOCK_RATE, device));
    EXPECT(properties.clockRate == same);
    CHECK_DRIVER(cuDeviceGetAttribute_(&same, CU_DEVICE_ATTRIBUTE_MAX_PITCH, device));
    EXPECT(properties.memPitch == same);
    CHECK_DRIVER(cuDeviceGetAttribute_(&same, CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, device));
    EXPECT(properties.textureAlign == same);
    char luid[8];
    unsigned mask;
    // Only Windows has such ids.
    SHOW_DRIVER(cuDeviceGetLuid_(luid, &mask, device));
    SHOW_DRIVER(cuDeviceComputeCapability_(&major, &minor, 99));
    // No context is current.
    DRIVER(cuFlushGPUDirectRDMAWrites);
    SHOW_DRIVER(cuFlushGPUDirectRDMAWrites_(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                                            CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER));
}

static void primary(CUdevice device) {
    DRIVER(cuDevicePrimaryCtxRetain);
    DRIVER(cuDevicePrimaryCtxRelease);
    DRIVER(cuDevicePrimaryCtxGetState);
    DRIVER(cuDevicePrimaryCtxSetFlags);
    DRIVER(cuDevicePrimaryCtxReset);
    DRIVER(cuCtxSetCurrent);
    DRIVER(cuCtxGetFlags);
    DRIVER(cuMemAlloc);
    DRIVER(cuMemsetD8);
    DRIVER(cuMemFree);
    unsigned flags = 99;
    int active = 99;
    CHECK_DRIVER(cuDevicePrimaryCtxGetState_(device, &flags, &active));
    std::printf("primary: flags %#x, active %d\n", flags & CU_CTX_SCHED_MASK, active);
    CHECK_DRIVER(cuDevicePrimaryCtxSetFlags_(device, CU_CTX_SCHED_SPIN));
    CUcontext context;
    CHECK_DRIVER(cuDevicePrimaryCtxRetain_(&context, device));
    CHECK_DRIVER(cuDevicePrimaryCtxGetState_(device, &flags, &active));
    std::printf("retained: flags %#x, active %d\n", flags & CU_CTX_SCHED_MASK, active);
    SHOW_DRIVER(cuDevicePrimaryCtxSetFlags_(device, 0x1000));
    CHECK_DRIVER(cuCtxSetCurrent_(context));
    CHECK_DRIVER(cuCtxGetFlags_(&flags));
    std::printf("current: flags %#x\n", flags & CU_CTX_SCHED_MASK);
    // The reset frees the memory of the context.
    CUdeviceptr memory;
    CHECK_DRIVER(cuMemAlloc_(&memory, 1 << 20));
    CHECK_DRIVER(cuDevicePrimaryCtxReset_(device));
    CHECK_DRIVER(cuDevicePrimaryCtxGetState_(device, &flags, &active));
    std::printf("reset: active %d\n", active);
    CHECK_DRIVER(cuCtxSetCurrent_(nullptr));
    EXPECT(cuMemFree_(memory) != CUDA_SUCCESS);
    CHECK_DRIVER(cuDevicePrimaryCtxRetain_(&context, device));
    CHECK_DRIVER(cuDevicePrimaryCtxGetState_(device, &flags, &active));
    std::printf("retained again: active %d\n", active);
    CHECK_DRIVER(cuCtxSetCurrent_(context));
    CHECK_DRIVER(cuMemAlloc_(&memory, 1 << 20));
    CHECK_DRIVER(cuMemsetD8_(memory, 1, 1 << 20));
    CHECK_DRIVER(cuMemFree_(memory));
}

// The oldest calls of contexts count their users; a new context has one.
static void users(CUdevice device) {
    DRIVER(cuCtxAttach);
    DRIVER(cuCtxDetach);
    DRIVER(cuCtxGetCurrent);
    DRIVER(cuCtxGetApiVersion);
    DRIVER(cuCtxSetCurrent);
    auto create = reinterpret_cast<OldCreate>(driver_symbol("cuCtxCreate_v2"));
    CUcontext before, context, same = nullptr, current;
    CHECK_DRIVER(cuCtxGetCurrent_(&before));
    SHOW_DRIVER(cuCtxAttach_(&same, 0));
    std::printf("primary: %s\n", same == before ? "the same" : "another");
    SHOW_DRIVER(cuCtxDetach_(before));
    CHECK_DRIVER(create(&context, 0, device));
    SHOW_DRIVER(cuCtxAttach_(&same, 1));
    SHOW_DRIVER(cuCtxAttach_(nullptr, 0));
    same = nullptr;
    SHOW_DRIVER(cuCtxAttach_(&same, 0));
    std::printf("own: %s\n", same == context ? "the same" : "another");
    SHOW_DRIVER(cuCtxDetach_(context));
    unsigned version = 0;
    SHOW_DRIVER(cuCtxGetApiVersion_(context, &version));
    CHECK_DRIVER(cuCtxSetCurrent_(before));
    SHOW_DRIVER(cuCtxDetach_(context));
    CHECK_DRIVER(cuCtxSetCurrent_(context));
    SHOW_DRIVER(cuCtxDetach_(context));
    CHECK_DRIVER(cuCtxGetCurrent_(&current));
    std::printf("current: %s\n", current == context ? "the context" : current == before ? "the one before" : current ? "another" : "none");
    CHECK_DRIVER(cuCtxSetCurrent_(before));
}

static void profiler() {
    typedef CUresult (*Initialize)(const char *, const char *, int);
    auto initialize = reinterpret_cast<Initialize>(driver_symbol("cuProfilerInitialize"));
    SHOW_DRIVER(initialize("no-such-file", "output", 0));
    SHOW_DRIVER(initialize(nullptr, nullptr, 0));
    typedef CUresult (*Switch)();
    auto start = reinterpret_cast<Switch>(driver_symbol("cuProfilerStart"));
    auto stop = reinterpret_cast<Switch>(driver_symbol("cuProfilerStop"));
    SHOW_DRIVER(start());
    SHOW_DRIVER(stop());
}

// Functions by name, as runtimes find them.
static void lookups() {
    typedef CUresult (*Lookup)(const char *, void **, int, cuuint64_t);
    typedef CUresult (*NewLookup)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
    auto old_form = reinterpret_cast<Lookup>(driver_symbol("cuGetProcAddress"));
    auto lookup = reinterpret_cast<NewLookup>(driver_symbol("cuGetProcAddress_v2"));
    const struct {
        const char *name;
        int version;
    } WANTED[] = {{"cuMemAlloc", 12000}, {"cuMemAlloc", 1000}, {"cuInit", 12000}, {"cuNoSuchCall", 12000}, {"cuStreamGetCtx", 12000},
                  {"cuMemAlloc", 12990}, {"cuMemAlloc", 99000}, {"cuNoSuchCall", 99000}, {"cuMemAlloc", -1}, {"cuMemAlloc", 0}};
    for (auto wanted : WANTED) {
        void *function = nullptr, *same = nullptr;
        // A value of its own, which stays if the driver refuses the version.
        auto result = CUdriverProcAddressQueryResult(7);
        CUresult found = lookup(wanted.name, &function, wanted.version, 0, &result);
        CUresult also = old_form(wanted.name, &same, wanted.version, 0);
        std::printf("%s of %d: %d, %d, %d, %s\n", wanted.name, wanted.version, int(found), int(result), int(also),
                    function ? function == same ? "found" : "another" : "none");
    }
    void *function;
    SHOW_DRIVER(lookup("cuNoSuchCall", &function, 12000, 0, nullptr));
    SHOW_DRIVER(lookup("cuMemAlloc", &function, 1000, 0, nullptr));
    SHOW_DRIVER(lookup("cuMemAlloc", &function, 12000, 8, nullptr));
    EXPECT(lookup("cuMemAlloc", &function, 12000, 0, nullptr) == CUDA_SUCCESS);
    EXPECT(function == driver_symbol("cuMemAlloc_v2"));
    DRIVER(cuGetExportTable);
    CUuuid unknown;
    std::memset(&unknown, 0x5a, sizeof unknown);
    const void *table = nullptr;
    EXPECT(cuGetExportTable_(&table, &unknown) != CUDA_SUCCESS);
}

int main() {
    DRIVER(cuInit);
    DRIVER(cuDeviceGet);
    CHECK_DRIVER(cuInit_(0));
    CUdevice device;
    CHECK_DRIVER(cuDeviceGet_(&device, 0));
    lookups();
    created(device);
    devices(device);
    primary(device);
    settings();
    users(device);
    profiler();
    std::printf("contextCalls: right\n");
    return 0;
}

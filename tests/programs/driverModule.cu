// The driver interface: PTX compiled at run time, kernel parameters in both forms, module
// variables, attributes, contexts, the library interface, and the codes for invalid images.
#include "driver.h"

#include <cstring>

static const char PTX[] = R"(
.version 6.3
.target sm_75
.address_size 64

.visible .global .align 4 .u32 base = 1000;
.visible .const .align 4 .u32 shift = 2;

// out[i] = (in[i] << shift) + base + extra
.visible .entry transform(.param .u64 in, .param .u64 out, .param .u32 count, .param .u16 extra)
{
    .reg .pred %p;
    .reg .u16 %h;
    .reg .b32 %r<10>;
    .reg .b64 %a<6>;
    ld.param.u64 %a1, [in];
    ld.param.u64 %a2, [out];
    ld.param.u32 %r1, [count];
    ld.param.u16 %h, [extra];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p, %r5, %r1;
    @%p bra DONE;
    cvta.to.global.u64 %a1, %a1;
    cvta.to.global.u64 %a2, %a2;
    mul.wide.u32 %a3, %r5, 4;
    add.u64 %a1, %a1, %a3;
    add.u64 %a2, %a2, %a3;
    ld.global.u32 %r6, [%a1];
    ld.const.u32 %r7, [shift];
    shl.b32 %r6, %r6, %r7;
    ld.global.u32 %r8, [base];
    add.u32 %r6, %r6, %r8;
    cvt.u32.u16 %r9, %h;
    add.u32 %r6, %r6, %r9;
    st.global.u32 [%a2], %r6;
DONE:
    ret;
}

.visible .entry nothing()
{
    ret;
}
)";

typedef CUresult (*ContextCreate)(CUcontext *, unsigned, CUdevice);  // the form of CUDA 3.2, which every driver still has

const int COUNT = 1000;

static void check(CUdeviceptr out, unsigned base, unsigned extra) {
    DRIVER(cuMemcpyDtoH);
    unsigned host[COUNT];
    CHECK_DRIVER(cuMemcpyDtoH_(host, out, sizeof host));
    for (unsigned i = 0; i < COUNT; i++) EXPECT(host[i] == (i << 2) + base + extra);
}

// Settings of functions and kernels that are named in two contexts.
static void settings(CUdevice device, CUcontext primary) {
    DRIVER(cuCtxSetCurrent);
    DRIVER(cuCtxSynchronize);
    DRIVER(cuCtxDestroy);
    DRIVER(cuModuleLoadData);
    DRIVER(cuModuleGetFunction);
    DRIVER(cuModuleUnload);
    DRIVER(cuLibraryLoadData);
    DRIVER(cuLibraryGetKernel);
    DRIVER(cuLibraryUnload);
    DRIVER(cuKernelGetFunction);
    DRIVER(cuKernelGetAttribute);
    DRIVER(cuKernelSetAttribute);
    DRIVER(cuFuncSetAttribute);
    DRIVER(cuFuncGetAttribute);
    DRIVER(cuLaunchKernel);
    const CUfunction_attribute SHARED = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    CUcontext other;
    CHECK_DRIVER(reinterpret_cast<ContextCreate>(driver_symbol("cuCtxCreate_v2"))(&other, 0, device));
    CHECK_DRIVER(cuCtxSetCurrent_(primary));
    // A module has one function, wherever the program looks it up.
    CUmodule module;
    CUfunction here, there;
    int value = 0;
    CHECK_DRIVER(cuModuleLoadData_(&module, PTX));
    CHECK_DRIVER(cuModuleGetFunction_(&here, module, "nothing"));
    CHECK_DRIVER(cuCtxSetCurrent_(other));
    CHECK_DRIVER(cuModuleGetFunction_(&there, module, "nothing"));
    CHECK_DRIVER(cuCtxSetCurrent_(primary));
    CHECK_DRIVER(cuFuncSetAttribute_(here, SHARED, 60000));
    CHECK_DRIVER(cuFuncSetAttribute_(there, SHARED, 20000));
    CHECK_DRIVER(cuFuncGetAttribute_(&value, SHARED, here));
    EXPECT(value == 20000);
    CHECK_DRIVER(cuFuncSetAttribute_(here, SHARED, 60000));
    CHECK_DRIVER(cuFuncGetAttribute_(&value, SHARED, there));
    EXPECT(value == 60000);
    CHECK_DRIVER(cuLaunchKernel_(here, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
    CHECK_DRIVER(cuCtxSetCurrent_(other));
    SHOW_DRIVER(cuLaunchKernel_(here, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
    CHECK_DRIVER(cuCtxSetCurrent_(primary));
    CHECK_DRIVER(cuLaunchKernel_(here, 1, 1, 1, 1, 1, 1, 55000, nullptr, nullptr, nullptr));
    CHECK_DRIVER(cuCtxSynchronize_());
    CHECK_DRIVER(cuModuleUnload_(module));
    std::printf("driverModule: settings of a function right\n");

    // The launch of a kernel has the settings of the context's function.
    CUlibrary library;
    CUkernel kernel;
    CHECK_DRIVER(cuLibraryLoadData_(&library, PTX, nullptr, nullptr, 0, nullptr, nullptr, 0));
    CHECK_DRIVER(cuLibraryGetKernel_(&kernel, library, "nothing"));
    CHECK_DRIVER(cuKernelGetFunction_(&here, kernel));
    CHECK_DRIVER(cuFuncSetAttribute_(here, SHARED, 60000));
    CUfunction any = reinterpret_cast<CUfunction>(kernel);
    SHOW_DRIVER(cuLaunchKernel_(any, 1, 1, 1, 1, 1, 1, 55000, nullptr, nullptr, nullptr));
    CHECK_DRIVER(cuCtxSynchronize_());
    CHECK_DRIVER(cuCtxSetCurrent_(other));
    SHOW_DRIVER(cuLaunchKernel_(any, 1, 1, 1, 1, 1, 1, 55000, nullptr, nullptr, nullptr));
    CHECK_DRIVER(cuCtxSynchronize_());

    // A kernel's attributes need no context.
    CHECK_DRIVER(cuLibraryGetKernel_(&kernel, library, "transform"));
    CHECK_DRIVER(cuCtxSetCurrent_(nullptr));
    CHECK_DRIVER(cuCtxSetCurrent_(nullptr));
    for (int bytes : {12000, 13000}) {
        CHECK_DRIVER(cuKernelSetAttribute_(SHARED, bytes, kernel, device));
        CHECK_DRIVER(cuKernelGetAttribute_(&value, SHARED, kernel, device));
        std::printf("kernel without a context: %d\n", value);
    }
    CHECK_DRIVER(cuCtxSetCurrent_(primary));
    CHECK_DRIVER(cuLibraryUnload_(library));
    CHECK_DRIVER(cuCtxDestroy_(other));
    std::printf("driverModule: settings of a kernel right\n");
}

static size_t each_thread(int block) { return size_t(block) * 100; }

// Sizes for which a search asked.
static int asked_count, asked[64];
static size_t note(int block) {
    if (asked_count < 64) asked[asked_count++] = block;
    return 0;
}

// The search of a block size: the largest size first, then multiples of a warp, until one fills a
// multiprocessor. Then the loading of a function.
static void sizes(CUdevice device) {
    DRIVER(cuDeviceGetAttribute);
    DRIVER(cuModuleLoadData);
    DRIVER(cuModuleGetFunction);
    DRIVER(cuModuleUnload);
    DRIVER(cuLibraryLoadData);
    DRIVER(cuLibraryGetKernel);
    DRIVER(cuLibraryUnload);
    DRIVER(cuFuncIsLoaded);
    DRIVER(cuFuncLoad);
    DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor);
    DRIVER(cuOccupancyMaxPotentialBlockSize);
    CUmodule module;
    CUfunction nothing;
    int full = 0;
    CHECK_DRIVER(cuDeviceGetAttribute_(&full, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device));
    CHECK_DRIVER(cuModuleLoadData_(&module, PTX));
    CHECK_DRIVER(cuModuleGetFunction_(&nothing, module, "nothing"));
    int grid = 0, block = 0;
    for (int limit : {0, 1000, 200, 100, 40, 33, 31, 1})
        for (bool each : {false, true}) {
            int best = 0, best_threads = 0, count = 0, wanted[64];
            for (int size = limit ? limit : 1024; size > 0 && best_threads < full; size = (size - 1) / 32 * 32) {
                int blocks = 0;
                CHECK_DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor_(&blocks, nothing, size, each ? each_thread(size) : 0));
                wanted[count++] = size;
                if (blocks * size > best_threads) best = size, best_threads = blocks * size;
            }
            CHECK_DRIVER(cuOccupancyMaxPotentialBlockSize_(&grid, &block, nothing, each ? each_thread : nullptr, 0, limit));
            EXPECT(block == best);
            if (each) continue;
            asked_count = 0;
            CHECK_DRIVER(cuOccupancyMaxPotentialBlockSize_(&grid, &block, nothing, note, 0, limit));
            EXPECT(block == best && asked_count == count && std::memcmp(asked, wanted, count * sizeof(int)) == 0);
        }
    SHOW_DRIVER(cuOccupancyMaxPotentialBlockSize_(&grid, &block, nothing, nullptr, 0, -1));
    std::printf("driverModule: sizes of blocks right\n");

    CUfunctionLoadingState state;
    CHECK_DRIVER(cuFuncLoad_(nothing));
    CHECK_DRIVER(cuFuncIsLoaded_(&state, nothing));
    EXPECT(state == CU_FUNCTION_LOADING_STATE_LOADED);
    CUlibrary library;
    CUkernel kernel;
    CHECK_DRIVER(cuLibraryLoadData_(&library, PTX, nullptr, nullptr, 0, nullptr, nullptr, 0));
    CHECK_DRIVER(cuLibraryGetKernel_(&kernel, library, "nothing"));
    SHOW_DRIVER(cuFuncLoad_(reinterpret_cast<CUfunction>(kernel)));
    SHOW_DRIVER(cuFuncIsLoaded_(&state, reinterpret_cast<CUfunction>(kernel)));
    CHECK_DRIVER(cuLibraryUnload_(library));
    CHECK_DRIVER(cuModuleUnload_(module));
}

int main() {
    CHECK(cudaFree(nullptr));
    DRIVER(cuInit);
    DRIVER(cuDeviceGet);
    DRIVER(cuDevicePrimaryCtxRetain);
    DRIVER(cuDevicePrimaryCtxRelease);
    DRIVER(cuDevicePrimaryCtxGetState);
    DRIVER(cuCtxGetCurrent);
    DRIVER(cuCtxSetCurrent);
    DRIVER(cuCtxPushCurrent);
    DRIVER(cuCtxPopCurrent);
    DRIVER(cuCtxDestroy);
    DRIVER(cuCtxSynchronize);
    DRIVER(cuModuleLoadData);
    DRIVER(cuModuleLoadDataEx);
    DRIVER(cuModuleGetFunction);
    DRIVER(cuModuleGetGlobal);
    DRIVER(cuModuleUnload);
    DRIVER(cuLibraryLoadData);
    DRIVER(cuLibraryGetKernel);
    DRIVER(cuLibraryUnload);
    DRIVER(cuKernelGetFunction);
    DRIVER(cuKernelSetAttribute);
    DRIVER(cuFuncSetAttribute);
    DRIVER(cuFuncGetModule);
    DRIVER(cuFuncGetAttribute);
    DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor);
    DRIVER(cuLaunchKernel);
    DRIVER(cuMemAlloc);
    DRIVER(cuMemFree);
    DRIVER(cuMemcpyHtoD);
    DRIVER(cuMemsetD32);
    DRIVER(cuMemGetAddressRange);
    DRIVER(cuPointerGetAttribute);
    DRIVER(cuGetErrorName);

    CHECK_DRIVER(cuInit_(0));
    CUdevice device;
    CUcontext primary, current;
    unsigned flags;
    int active;
    CHECK_DRIVER(cuDeviceGet_(&device, 0));
    CHECK_DRIVER(cuDevicePrimaryCtxRetain_(&primary, device));
    CHECK_DRIVER(cuCtxGetCurrent_(&current));
    EXPECT(current == primary);
    CHECK_DRIVER(cuDevicePrimaryCtxGetState_(device, &flags, &active));
    EXPECT(active == 1);

    unsigned host[COUNT];
    for (unsigned i = 0; i < COUNT; i++) host[i] = i;
    CUdeviceptr in, out;
    CHECK_DRIVER(cuMemAlloc_(&in, sizeof host));
    CHECK_DRIVER(cuMemAlloc_(&out, sizeof host));
    CHECK_DRIVER(cuMemcpyHtoD_(in, host, sizeof host));
    CUdeviceptr start;
    size_t size;
    CHECK_DRIVER(cuMemGetAddressRange_(&start, &size, in + 100));
    EXPECT(start == in && size >= sizeof host);
    int ordinal = -1;
    CHECK_DRIVER(cuPointerGetAttribute_(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, in));
    EXPECT(ordinal == 0);

    CUmodule module;
    CUfunction transform, nothing;
    char log[1024] = "";
    CUjit_option options[] = {CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_MAX_REGISTERS};
    void *values[] = {log, reinterpret_cast<void *>(sizeof log), reinterpret_cast<void *>(size_t(32))};
    CHECK_DRIVER(cuModuleLoadDataEx_(&module, PTX, 3, options, values));
    CHECK_DRIVER(cuModuleUnload_(module));
    values[1] = nullptr;
    CHECK_DRIVER(cuModuleLoadDataEx_(&module, PTX, 3, options, values));
    CHECK_DRIVER(cuModuleGetFunction_(&transform, module, "transform"));
    CHECK_DRIVER(cuModuleGetFunction_(&nothing, module, "nothing"));
    unsigned count = COUNT;
    unsigned short extra = 7;
    void *parameters[] = {&in, &out, &count, &extra};
    CHECK_DRIVER(cuLaunchKernel_(transform, 8, 1, 1, 128, 1, 1, 0, nullptr, parameters, nullptr));
    check(out, 1000, 7);
    CHECK_DRIVER(cuLaunchKernel_(nothing, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));

    struct {
        CUdeviceptr in, out;
        unsigned count;
        unsigned short extra;
    } packed = {in, out, COUNT, 9};
    size_t packed_size = 22;
    void *extra_form[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &packed_size,
                          CU_LAUNCH_PARAM_END};
    CHECK_DRIVER(cuMemsetD32_(out, 0, COUNT));
    CHECK_DRIVER(cuLaunchKernel_(transform, 8, 1, 1, 128, 1, 1, 0, nullptr, nullptr, extra_form));
    check(out, 1000, 9);
    std::printf("driverModule: module from PTX text right\n");

    CUdeviceptr base;
    unsigned new_base = 5;
    CHECK_DRIVER(cuModuleGetGlobal_(&base, &size, module, "base"));
    EXPECT(size == 4);
    CHECK_DRIVER(cuMemcpyHtoD_(base, &new_base, 4));
    CHECK_DRIVER(cuLaunchKernel_(transform, 8, 1, 1, 128, 1, 1, 0, nullptr, parameters, nullptr));
    check(out, 5, 7);
    int value = -1, blocks = -1;
    CHECK_DRIVER(cuFuncGetAttribute_(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, transform));
    EXPECT(value >= 128 && value <= 1024);
    CHECK_DRIVER(cuFuncGetAttribute_(&value, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, transform));
    EXPECT(value == 0);
    CHECK_DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor_(&blocks, transform, 128, 0));
    EXPECT(blocks >= 1);
    std::printf("driverModule: variables and attributes right\n");

    SHOW_DRIVER(cuModuleGetFunction_(&nothing, module, "absent"));
    SHOW_DRIVER(cuModuleGetGlobal_(&base, &size, module, "absent"));
    CUmodule wrong;
    SHOW_DRIVER(cuModuleLoadData_(&wrong, ".version 6.3\n.target sm_75\n.address_size 64\n.visible .entry x() { nonsense; }\n"));
    SHOW_DRIVER(cuModuleLoadData_(&wrong, "neither PTX nor anything else"));
    SHOW_DRIVER(cuLaunchKernel_(transform, 0, 1, 1, 128, 1, 1, 0, nullptr, parameters, nullptr));
    SHOW_DRIVER(cuLaunchKernel_(transform, 1, 1, 1, 4096, 1, 1, 0, nullptr, parameters, nullptr));
    SHOW_DRIVER(cuMemFree_(in + 4));
    const char *name = nullptr;
    CHECK_DRIVER(cuGetErrorName_(CUDA_ERROR_NOT_FOUND, &name));
    EXPECT(std::strcmp(name, "CUDA_ERROR_NOT_FOUND") == 0);
    CHECK_DRIVER(cuModuleUnload_(module));

    CUlibrary library;
    CUkernel kernel;
    // CU_LIBRARY_BINARY_IS_PRESERVED needs no value, and cuBLAS passes none.
    CUlibraryOption kept = CU_LIBRARY_BINARY_IS_PRESERVED;
    CHECK_DRIVER(cuLibraryLoadData_(&library, PTX, nullptr, nullptr, 0, &kept, nullptr, 1));
    CHECK_DRIVER(cuLibraryUnload_(library));
    CHECK_DRIVER(cuLibraryLoadData_(&library, PTX, nullptr, nullptr, 0, nullptr, nullptr, 0));
    CHECK_DRIVER(cuLibraryGetKernel_(&kernel, library, "transform"));
    extra = 11;
    CHECK_DRIVER(cuLaunchKernel_(reinterpret_cast<CUfunction>(kernel), 8, 1, 1, 128, 1, 1, 0, nullptr, parameters, nullptr));
    check(out, 1000, 11);
    CHECK_DRIVER(cuKernelGetFunction_(&transform, kernel));
    CHECK_DRIVER(cuLaunchKernel_(transform, 8, 1, 1, 128, 1, 1, 0, nullptr, parameters, nullptr));
    check(out, 1000, 11);
    CUmodule inside_library;
    CHECK_DRIVER(cuFuncGetModule_(&inside_library, transform));
    CHECK_DRIVER(cuModuleGetGlobal_(&base, &size, inside_library, "base"));
    EXPECT(size == 4);
    // A function without a setting of its own has its kernel's.
    for (int bytes : {20000, 30000, 20000}) {
        CHECK_DRIVER(cuKernelSetAttribute_(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes, kernel, device));
        CHECK_DRIVER(cuFuncGetAttribute_(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, transform));
        std::printf("kernel %d: function %d\n", bytes, value);
        CHECK_DRIVER(cuFuncSetAttribute_(transform, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 10000));
        CHECK_DRIVER(cuFuncGetAttribute_(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, transform));
        std::printf("function 10000: function %d\n", value);
    }
    SHOW_DRIVER(cuLibraryGetKernel_(&kernel, library, "absent"));
    CHECK_DRIVER(cuLibraryUnload_(library));
    std::printf("driverModule: library interface right\n");

    settings(device, primary);
    sizes(device);

    // A context of its own, in addition to the primary one.
    CUcontext own;
    CHECK_DRIVER(reinterpret_cast<ContextCreate>(driver_symbol("cuCtxCreate_v2"))(&own, 0, device));
    CHECK_DRIVER(cuCtxGetCurrent_(&current));
    EXPECT(current == own && own != primary);
    CUdeviceptr inside;
    CHECK_DRIVER(cuMemAlloc_(&inside, 4096));
    CHECK_DRIVER(cuModuleLoadData_(&module, PTX));
    CHECK_DRIVER(cuModuleGetFunction_(&transform, module, "transform"));
    CHECK_DRIVER(cuMemcpyHtoD_(inside, host, 4000));
    void *own_parameters[] = {&inside, &inside, &count, &extra};
    CHECK_DRIVER(cuLaunchKernel_(transform, 8, 1, 1, 128, 1, 1, 0, nullptr, own_parameters, nullptr));
    CHECK_DRIVER(cuCtxSynchronize_());
    check(inside, 1000, 11);
    CHECK_DRIVER(cuCtxPopCurrent_(&current));
    EXPECT(current == own);
    CHECK_DRIVER(cuCtxPushCurrent_(primary));
    check(out, 1000, 11);
    CHECK_DRIVER(cuCtxPopCurrent_(&current));
    EXPECT(current == primary);
    CHECK_DRIVER(cuCtxDestroy_(own));
    CHECK_DRIVER(cuCtxSetCurrent_(primary));
    check(out, 1000, 11);
    CHECK_DRIVER(cuMemFree_(in));
    CHECK_DRIVER(cuMemFree_(out));
    CHECK_DRIVER(cuDevicePrimaryCtxRelease_(device));
    std::printf("driverModule: contexts right\n");
    return 0;
}

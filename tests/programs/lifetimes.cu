// Things that outlive a context, and things that end with it: memory of pools, variables of
// modules and libraries, a context that other threads still use.
#include "driver.h"

#include <cstring>
#include <thread>

static const char PTX[] = R"(
.version 6.3
.target sm_75
.address_size 64

.visible .global .attribute(.managed) .align 4 .u32 shared = 5;
.visible .global .align 4 .u32 own = 6;

.visible .entry add()
{
    .reg .b32 %r<3>;
    ld.global.u32 %r1, [shared];
    add.u32 %r1, %r1, 1;
    st.global.u32 [shared], %r1;
    ld.global.u32 %r2, [own];
    add.u32 %r2, %r2, 1;
    st.global.u32 [own], %r2;
    ret;
}
)";

static const size_t BYTES = 1 << 20;

static CUcontext new_context() {
    static auto create = reinterpret_cast<CUresult (*)(CUcontext *, unsigned, CUdevice)>(driver_symbol("cuCtxCreate_v2"));
    CUcontext made;
    CHECK_DRIVER(create(&made, 0, 0));
    return made;
}

static void destroy(CUcontext context) {
    static auto call = reinterpret_cast<CUresult (*)(CUcontext)>(driver_symbol("cuCtxDestroy_v2"));
    CHECK_DRIVER(call(context));
}

// Its newest form has a parameter.
static CUresult context_synchronize() {
    static auto call = reinterpret_cast<CUresult (*)()>(driver_symbol("cuCtxSynchronize"));
    return call();
}

static void synchronize() { CHECK_DRIVER(context_synchronize()); }

// Allocates from the device's pool in the current context, and fills the memory.
static CUdeviceptr from_pool(unsigned char value) {
    DRIVER_BY_RUNTIME(cuMemAllocAsync);
    DRIVER_BY_RUNTIME(cuMemsetD8Async);
    CUdeviceptr memory;
    CHECK_DRIVER(cuMemAllocAsync_(&memory, BYTES, nullptr));
    CHECK_DRIVER(cuMemsetD8Async_(memory, value, BYTES, nullptr));
    synchronize();
    return memory;
}

static void expect_filled(CUdeviceptr memory, unsigned char value) {
    static auto copy = reinterpret_cast<CUresult (*)(void *, CUdeviceptr, size_t)>(driver_symbol("cuMemcpyDtoH_v2"));
    static unsigned char host[BYTES];
    std::memset(host, 0, BYTES);
    CHECK_DRIVER(copy(host, memory, BYTES));
    for (unsigned char byte : host) EXPECT(byte == value);
    // By an address of unknown kind.
    DRIVER_BY_RUNTIME(cuMemcpy);
    std::memset(host, 0, BYTES);
    CHECK_DRIVER(cuMemcpy_(CUdeviceptr(host), memory, BYTES));
    for (unsigned char byte : host) EXPECT(byte == value);
}

static void pools_outlive_contexts() {
    DRIVER_BY_RUNTIME(cuMemFreeAsync);
    DRIVER_BY_RUNTIME(cuPointerGetAttribute);
    static auto free = reinterpret_cast<CUresult (*)(CUdeviceptr)>(driver_symbol("cuMemFree_v2"));
    CUcontext first = new_context();
    const CUdeviceptr one = from_pool(1), two = from_pool(2);
    destroy(first);
    CUcontext second = new_context();
    expect_filled(one, 1);
    expect_filled(two, 2);
    CUmemorytype kind{};
    int ordinal = -1;
    CHECK_DRIVER(cuPointerGetAttribute_(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, one));
    CHECK_DRIVER(cuPointerGetAttribute_(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, one));
    EXPECT(kind == CU_MEMORYTYPE_DEVICE && ordinal == 0);
    CUcontext of = second;
    CHECK_DRIVER(cuPointerGetAttribute_(&of, CU_POINTER_ATTRIBUTE_CONTEXT, one));
    EXPECT(of == nullptr);
    CHECK_DRIVER(cuMemFreeAsync_(one, nullptr));
    CHECK_DRIVER(free(two));
    SHOW_DRIVER(free(two));
    destroy(second);
    std::printf("lifetimes: memory of pools outlives its context\n");
}

static CUmodule module_of() {
    DRIVER_BY_RUNTIME(cuModuleLoadData);
    CUmodule made;
    CHECK_DRIVER(cuModuleLoadData_(&made, PTX));
    return made;
}

static CUdeviceptr variable(CUmodule module, const char *name) {
    static auto global = reinterpret_cast<CUresult (*)(CUdeviceptr *, size_t *, CUmodule, const char *)>(driver_symbol("cuModuleGetGlobal_v2"));
    CUdeviceptr address;
    size_t size;
    CHECK_DRIVER(global(&address, &size, module, name));
    EXPECT(size == 4);
    return address;
}

static int managed(CUdeviceptr address) { return *reinterpret_cast<volatile int *>(address); }

static void run(CUmodule module) {
    DRIVER_BY_RUNTIME(cuModuleGetFunction);
    DRIVER_BY_RUNTIME(cuLaunchKernel);
    CUfunction add;
    CHECK_DRIVER(cuModuleGetFunction_(&add, module, "add"));
    CHECK_DRIVER(cuLaunchKernel_(add, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
    synchronize();
}

static int value_of(CUdeviceptr address) {
    static auto copy = reinterpret_cast<CUresult (*)(void *, CUdeviceptr, size_t)>(driver_symbol("cuMemcpyDtoH_v2"));
    int value;
    CHECK_DRIVER(copy(&value, address, sizeof value));
    return value;
}

static void variables_end_with_their_module() {
    DRIVER_BY_RUNTIME(cuLibraryLoadData);
    DRIVER_BY_RUNTIME(cuLibraryGetModule);
    DRIVER_BY_RUNTIME(cuLibraryUnload);
    for (int round = 0; round < 3; round++) {
        CUcontext context = new_context();
        CUmodule module = module_of();
        const CUdeviceptr shared = variable(module, "shared"), own = variable(module, "own");
        for (int runs = 1; runs <= 2; runs++) {
            run(module);
            EXPECT(managed(shared) == 5 + runs && value_of(own) == 6 + runs);
        }
        destroy(context);
        context = new_context();
        synchronize();
        destroy(context);
    }
    std::printf("lifetimes: variables end with their context\n");
    CUcontext context = new_context();
    for (int round = 0; round < 3; round++) {
        CUlibrary library;
        CUmodule module;
        CHECK_DRIVER(cuLibraryLoadData_(&library, PTX, nullptr, nullptr, 0, nullptr, nullptr, 0));
        CHECK_DRIVER(cuLibraryGetModule_(&module, library));
        const CUdeviceptr shared = variable(module, "shared"), own = variable(module, "own");
        run(module);
        EXPECT(managed(shared) == 6 && value_of(own) == 7);
        CHECK_DRIVER(cuLibraryUnload_(library));
        synchronize();
    }
    destroy(context);
    std::printf("lifetimes: variables end with their library\n");
}

static void other_contexts_own_variables() {
    DRIVER_BY_RUNTIME(cuPointerGetAttribute);
    DRIVER_BY_RUNTIME(cuCtxSetCurrent);
    CUcontext first = new_context();
    CUmodule module = module_of();
    CUcontext second = new_context();
    const CUdeviceptr own = variable(module, "own");
    CUcontext known = nullptr;
    CHECK_DRIVER(cuPointerGetAttribute_(&known, CU_POINTER_ATTRIBUTE_CONTEXT, own));
    std::printf("a variable belongs to the context %s\n", known == first ? "of its module" : known == second ? "that is current" : "of neither");
    destroy(second);
    CHECK_DRIVER(cuCtxSetCurrent_(first));
    EXPECT(value_of(own) == 6);
    destroy(first);
}

// Another thread still has the context that ends.
static void ended_contexts() {
    DRIVER_BY_RUNTIME(cuCtxSetCurrent);
    DRIVER_BY_RUNTIME(cuCtxGetCurrent);
    static auto push = reinterpret_cast<CUresult (*)(CUcontext)>(driver_symbol("cuCtxPushCurrent_v2"));
    static auto end = reinterpret_cast<CUresult (*)(CUcontext)>(driver_symbol("cuCtxDestroy_v2"));
    static auto allocate = reinterpret_cast<CUresult (*)(CUdeviceptr *, size_t)>(driver_symbol("cuMemAlloc_v2"));
    static auto create = reinterpret_cast<CUresult (*)(CUstream *, unsigned)>(driver_symbol("cuStreamCreate"));
    static auto info = reinterpret_cast<CUresult (*)(size_t *, size_t *)>(driver_symbol("cuMemGetInfo_v2"));
    CUcontext ended = new_context(), other = new_context();
    CHECK_DRIVER(cuCtxSetCurrent_(ended));
    synchronize();
    std::thread([&] {
        CHECK_DRIVER(cuCtxSetCurrent_(ended));
        std::thread(destroy, ended).join();
        size_t left, all;
        SHOW_DRIVER(context_synchronize());
        SHOW_DRIVER(info(&left, &all));
        CUdeviceptr memory;
        CUstream stream;
        CUcontext current = nullptr;
        SHOW_DRIVER(allocate(&memory, 64));
        SHOW_DRIVER(create(&stream, CU_STREAM_NON_BLOCKING));
        SHOW_DRIVER(cuCtxGetCurrent_(&current));
        EXPECT(current == ended);
        SHOW_DRIVER(push(ended));
        SHOW_DRIVER(cuCtxSetCurrent_(ended));
        SHOW_DRIVER(end(ended));
        CHECK_DRIVER(cuCtxSetCurrent_(other));
        CHECK_DRIVER(context_synchronize());
        CHECK_DRIVER(info(&left, &all));
    }).join();
    CHECK_DRIVER(cuCtxSetCurrent_(other));
    synchronize();
    destroy(other);
    // The ended one is below it on the stack.
    CHECK_DRIVER(cuCtxSetCurrent_(nullptr));
    std::printf("lifetimes: other contexts work\n");
}

static void priorities() {
    DRIVER_BY_RUNTIME(cuStreamCreateWithPriority);
    DRIVER_BY_RUNTIME(cuStreamSetAttribute);
    DRIVER_BY_RUNTIME(cuStreamGetPriority);
    CUcontext context = new_context();
    CUstream stream;
    CHECK_DRIVER(cuStreamCreateWithPriority_(&stream, 0, 0));
    CUstreamAttrValue value{};
    value.priority = -2;
    int priority = 9;
    SHOW_DRIVER(cuStreamSetAttribute_(stream, CU_STREAM_ATTRIBUTE_PRIORITY, &value));
    CHECK_DRIVER(cuStreamGetPriority_(stream, &priority));
    std::printf("priority %d\n", priority);
    destroy(context);
}

int main() {
    static auto init = reinterpret_cast<CUresult (*)(unsigned)>(driver_symbol("cuInit"));
    CHECK_DRIVER(init(0));
    pools_outlive_contexts();
    variables_end_with_their_module();
    other_contexts_own_variables();
    ended_contexts();
    priorities();
    // The runtime's pools outlive a reset, too.
    unsigned char *memory, host[64] = {};
    CHECK(cudaMallocAsync(&memory, BYTES, 0));
    CHECK(cudaMemset(memory, 3, BYTES));
    CHECK(cudaDeviceReset());
    CHECK(cudaMemcpy(host, memory, sizeof host, cudaMemcpyDefault));
    for (unsigned char byte : host) EXPECT(byte == 3);
    CHECK(cudaFree(memory));
    std::printf("lifetimes: memory of pools outlives a reset\n");
    return 0;
}

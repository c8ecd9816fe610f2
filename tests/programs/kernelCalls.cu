// Kernels and functions: all of a module or library, their names, parameters and owners, loading,
// settings; a list of names longer than any message.
// Old calls without a warning.
#define CUDA_ENABLE_DEPRECATED
#include "driver.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

static const char PTX[] = R"(
.version 6.3
.target sm_75
.address_size 64

.visible .global .align 4 .u32 variable = 7;

.visible .entry put(.param .u32 value)
{
    .reg .b32 %r<2>;
    ld.param.u32 %r1, [value];
    st.global.u32 [variable], %r1;
    ret;
}

.visible .entry nothing()
{
    ret;
}

.visible .entry many(.param .u8 first, .param .u64 second, .param .align 16 .b8 third[24])
{
    ret;
}
)";

static void libraries() {
    DRIVER(cuLibraryLoadData);
    DRIVER(cuLibraryUnload);
    DRIVER(cuLibraryGetKernel);
    DRIVER(cuLibraryGetKernelCount);
    DRIVER(cuLibraryEnumerateKernels);
    DRIVER(cuLibraryGetManaged);
    DRIVER(cuLibraryGetGlobal);
    DRIVER(cuKernelGetName);
    // Not in the headers of CUDA 12.4.
    typedef CUresult (*GetLibrary)(CUlibrary *, CUkernel);
    auto library_of = reinterpret_cast<GetLibrary>(driver_symbol("cuKernelGetLibrary"));
    DRIVER(cuKernelGetParamInfo);
    DRIVER(cuKernelSetCacheConfig);
    CUlibrary library, owner;
    CHECK_DRIVER(cuLibraryLoadData_(&library, PTX, nullptr, nullptr, 0, nullptr, nullptr, 0));
    unsigned count = 0;
    CHECK_DRIVER(cuLibraryGetKernelCount_(&count, library));
    std::printf("library: %u kernels\n", count);
    std::vector<CUkernel> kernels(count);
    CHECK_DRIVER(cuLibraryEnumerateKernels_(kernels.data(), count, library));
    std::set<std::string> names;
    for (CUkernel kernel : kernels) {
        const char *name;
        CUkernel same;
        CHECK_DRIVER(cuKernelGetName_(&name, kernel));
        names.insert(name);
        CHECK_DRIVER(cuLibraryGetKernel_(&same, library, name));
        EXPECT(same == kernel);
        CHECK_DRIVER(library_of(&owner, kernel));
        EXPECT(owner == library);
        CHECK_DRIVER(cuKernelSetCacheConfig_(kernel, CU_FUNC_CACHE_PREFER_SHARED, 0));
    }
    for (const std::string &name : names) std::printf("kernel %s\n", name.c_str());
    CUkernel kernel;
    CHECK_DRIVER(cuLibraryGetKernel_(&kernel, library, "many"));
    for (size_t i = 0; i < 4; i++) {
        size_t offset = 0, size = 0;
        CUresult known = cuKernelGetParamInfo_(kernel, i, &offset, &size);
        std::printf("parameter %zu: %d, %zu bytes at %zu\n", i, int(known), size, offset);
    }
    // Drivers since CUDA 13.1 have the number.
    typedef CUresult (*Count)(CUkernel, size_t *);
    if (auto number = reinterpret_cast<Count>(driver_symbol_if("cuKernelGetParamCount"))) {
        size_t parameters = 0;
        CHECK_DRIVER(number(kernel, &parameters));
        EXPECT(parameters == 3);
    }
    CUkernel one;
    CHECK_DRIVER(cuLibraryEnumerateKernels_(&one, 1, library));
    EXPECT(std::count(kernels.begin(), kernels.end(), one) == 1);
    CUdeviceptr variable;
    size_t size;
    CHECK_DRIVER(cuLibraryGetGlobal_(&variable, &size, library, "variable"));
    EXPECT(size == 4);
    SHOW_DRIVER(cuLibraryGetManaged_(&variable, &size, library, "variable"));
    SHOW_DRIVER(cuLibraryGetManaged_(&variable, &size, library, "nothing of this name"));
    SHOW_DRIVER(cuLibraryGetKernel_(&kernel, library, "variable"));
    SHOW_DRIVER(cuLibraryGetKernelCount_(nullptr, library));
    CHECK_DRIVER(cuLibraryUnload_(library));
}

static void files() {
    DRIVER(cuLibraryLoadFromFile);
    DRIVER(cuLibraryUnload);
    DRIVER(cuLibraryGetKernelCount);
    char path[] = "/tmp/kernelCalls-XXXXXX";
    int file = mkstemp(path);
    EXPECT(file >= 0);
    EXPECT(write(file, PTX, sizeof PTX) == ssize_t(sizeof PTX));
    close(file);
    CUlibrary library;
    CHECK_DRIVER(cuLibraryLoadFromFile_(&library, path, nullptr, nullptr, 0, nullptr, nullptr, 0));
    unlink(path);
    unsigned count = 0;
    CHECK_DRIVER(cuLibraryGetKernelCount_(&count, library));
    EXPECT(count == 3);
    CHECK_DRIVER(cuLibraryUnload_(library));
    SHOW_DRIVER(cuLibraryLoadFromFile_(&library, "/nonexistent/file", nullptr, nullptr, 0, nullptr, nullptr, 0));
    std::printf("kernelCalls: files right\n");
}

static void modules() {
    DRIVER(cuModuleLoadData);
    DRIVER(cuModuleLoadFatBinary);
    DRIVER(cuModuleUnload);
    DRIVER(cuModuleGetFunction);
    DRIVER(cuModuleGetFunctionCount);
    DRIVER(cuModuleEnumerateFunctions);
    DRIVER(cuModuleGetGlobal);
    DRIVER(cuFuncGetName);
    DRIVER(cuFuncGetModule);
    DRIVER(cuFuncIsLoaded);
    DRIVER(cuFuncLoad);
    DRIVER(cuFuncSetSharedMemConfig);
    DRIVER(cuOccupancyMaxPotentialBlockSizeWithFlags);
    DRIVER(cuOccupancyMaxPotentialClusterSize);
    DRIVER(cuLaunchKernel);
    DRIVER(cuMemcpyDtoH);
    CUmodule module, owner;
    CHECK_DRIVER(cuModuleLoadData_(&module, PTX));
    unsigned count = 0;
    CHECK_DRIVER(cuModuleGetFunctionCount_(&count, module));
    std::printf("module: %u functions\n", count);
    std::vector<CUfunction> functions(count);
    CHECK_DRIVER(cuModuleEnumerateFunctions_(functions.data(), count, module));
    std::set<std::string> names;
    for (CUfunction function : functions) {
        const char *name;
        CUfunction same;
        CHECK_DRIVER(cuFuncGetName_(&name, function));
        names.insert(name);
        CHECK_DRIVER(cuModuleGetFunction_(&same, module, name));
        EXPECT(same == function);
        CHECK_DRIVER(cuFuncGetModule_(&owner, function));
        EXPECT(owner == module);
        CHECK_DRIVER(cuFuncLoad_(function));
        CUfunctionLoadingState state;
        CHECK_DRIVER(cuFuncIsLoaded_(&state, function));
        EXPECT(state == CU_FUNCTION_LOADING_STATE_LOADED);
    }
    for (const std::string &name : names) std::printf("function %s\n", name.c_str());
    CUfunction put;
    CHECK_DRIVER(cuModuleGetFunction_(&put, module, "put"));
    SHOW_DRIVER(cuFuncSetSharedMemConfig_(put, CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE));
    typedef CUresult (*Count)(CUfunction, size_t *);
    if (auto number = reinterpret_cast<Count>(driver_symbol_if("cuFuncGetParamCount"))) {
        size_t parameters = 0;
        CHECK_DRIVER(number(put, &parameters));
        EXPECT(parameters == 1);
    }
    int grid = 0, block = 0, clusters = 0;
    CHECK_DRIVER(cuOccupancyMaxPotentialBlockSizeWithFlags_(&grid, &block, put, nullptr, 0, 256,
                                                            CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE));
    EXPECT(grid > 0 && block == 256);
    CUlaunchConfig config = {};
    config.gridDimX = 64;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = 128;
    // The simulated driver has no clusters.
    CUresult known = cuOccupancyMaxPotentialClusterSize_(&clusters, put, &config);
    EXPECT(known == CUDA_ERROR_NOT_SUPPORTED || (known == CUDA_SUCCESS && clusters >= 1));
    unsigned value = 42, found = 0;
    void *arguments[] = {&value};
    CHECK_DRIVER(cuLaunchKernel_(put, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr));
    CUdeviceptr variable;
    size_t size;
    CHECK_DRIVER(cuModuleGetGlobal_(&variable, &size, module, "variable"));
    CHECK_DRIVER(cuMemcpyDtoH_(&found, variable, size));
    EXPECT(found == 42);
    SHOW_DRIVER(cuModuleGetFunctionCount_(nullptr, module));
    CHECK_DRIVER(cuModuleUnload_(module));
    // The call takes PTX as well.
    CHECK_DRIVER(cuModuleLoadFatBinary_(&module, PTX));
    CHECK_DRIVER(cuModuleGetFunction_(&put, module, "put"));
    CHECK_DRIVER(cuModuleUnload_(module));
    std::printf("kernelCalls: modules right\n");
}

// More than 4 MiB of names.
static void long_list() {
    const int COUNT = 2900;
    DRIVER(cuModuleLoadData);
    DRIVER(cuModuleUnload);
    DRIVER(cuModuleGetFunctionCount);
    DRIVER(cuModuleEnumerateFunctions);
    DRIVER(cuFuncGetName);
    std::string image = ".version 6.3\n.target sm_75\n.address_size 64\n", stem(1500, 'k');
    std::vector<std::string> wanted;
    for (int i = 0; i < COUNT; i++) {
        wanted.push_back(stem + std::to_string(10000 + i));
        image += ".visible .entry " + wanted.back() + "()\n{\n    ret;\n}\n";
    }
    CUmodule module;
    CHECK_DRIVER(cuModuleLoadData_(&module, image.c_str()));
    unsigned count = 0;
    CHECK_DRIVER(cuModuleGetFunctionCount_(&count, module));
    EXPECT(count == COUNT);
    std::vector<CUfunction> functions(COUNT);
    CHECK_DRIVER(cuModuleEnumerateFunctions_(functions.data(), count, module));
    std::vector<std::string> names;
    for (CUfunction function : functions) {
        const char *name;
        CHECK_DRIVER(cuFuncGetName_(&name, function));
        names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    EXPECT(names == wanted);
    CHECK_DRIVER(cuModuleUnload_(module));
    std::printf("kernelCalls: %d names right\n", COUNT);
}

int main() {
    CHECK(cudaFree(nullptr));
    libraries();
    files();
    modules();
    long_list();
    return 0;
}

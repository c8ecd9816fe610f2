// Virtual memory management: a reserved range, physical memory mapped into it piece by piece,
// access, growth, unmapping and reuse.
#include "driver.h"

#include <vector>

__global__ void fill(unsigned *values, size_t count, unsigned add) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        values[i] = unsigned(i) * 7u + add;
}

int main() {
    CHECK(cudaFree(nullptr));
    DRIVER(cuMemGetAllocationGranularity);
    DRIVER(cuMemAddressReserve);
    DRIVER(cuMemAddressFree);
    DRIVER(cuMemCreate);
    DRIVER(cuMemRelease);
    DRIVER(cuMemMap);
    DRIVER(cuMemUnmap);
    DRIVER(cuMemSetAccess);
    DRIVER(cuMemGetAccess);

    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = 0;
    size_t granularity = 0;
    CHECK_DRIVER(cuMemGetAllocationGranularity_(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    EXPECT(granularity >= 4096 && (granularity & (granularity - 1)) == 0);
    const size_t piece = (size_t(2 << 20) + granularity - 1) / granularity * granularity, pieces = 4;
    CUdeviceptr range;
    CHECK_DRIVER(cuMemAddressReserve_(&range, pieces * piece, 0, 0, 0));
    CUmemAccessDesc access = {};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

    CUmemGenericAllocationHandle handles[pieces];
    for (size_t mapped = 0; mapped < pieces; mapped++) {
        CHECK_DRIVER(cuMemCreate_(&handles[mapped], piece, &properties, 0));
        CHECK_DRIVER(cuMemMap_(range + mapped * piece, piece, 0, handles[mapped], 0));
        CHECK_DRIVER(cuMemSetAccess_(range + mapped * piece, piece, &access, 1));
        CHECK_DRIVER(cuMemRelease_(handles[mapped]));  // the mapping keeps the memory
        size_t count = (mapped + 1) * piece / sizeof(unsigned);
        unsigned *memory = reinterpret_cast<unsigned *>(range);
        fill<<<16, 128>>>(memory, count, unsigned(mapped));
        CHECK(cudaGetLastError());
        std::vector<unsigned> host(count);
        CHECK(cudaMemcpy(host.data(), memory, count * sizeof(unsigned), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < count; i += 97) EXPECT(host[i] == unsigned(i) * 7u + unsigned(mapped));
        EXPECT(host[count - 1] == unsigned(count - 1) * 7u + unsigned(mapped));
    }
    unsigned long long flags = 0;
    CHECK_DRIVER(cuMemGetAccess_(&flags, &access.location, range + piece));
    EXPECT(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

    // Any address inside a mapping yields the mapping's start and size.
    DRIVER(cuMemGetAddressRange);
    DRIVER(cuPointerGetAttribute);
    CUdeviceptr base = 0;
    size_t size = 0;
    CHECK_DRIVER(cuMemGetAddressRange_(&base, &size, range + 2 * piece + 20));
    EXPECT(base == range + 2 * piece && size == piece);
    int type = 0, ordinal = -1;
    CHECK_DRIVER(cuPointerGetAttribute_(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, range + 20));
    CHECK_DRIVER(cuPointerGetAttribute_(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, range + 20));
    EXPECT(type == CU_MEMORYTYPE_DEVICE && ordinal == 0);
    unsigned long long types = 7;
    CHECK_DRIVER(cuPointerGetAttribute_(&types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, range + 20));
    EXPECT(types == 0);
    // Memory that may be exported as a descriptor.
    CUmemAllocationProp exported = properties;
    exported.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUdeviceptr shown;
    CUmemGenericAllocationHandle handle;
    CHECK_DRIVER(cuMemAddressReserve_(&shown, piece, 0, 0, 0));
    CHECK_DRIVER(cuMemCreate_(&handle, piece, &exported, 0));
    CHECK_DRIVER(cuMemMap_(shown, piece, 0, handle, 0));
    CHECK_DRIVER(cuPointerGetAttribute_(&types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, shown));
    EXPECT(types == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    CHECK_DRIVER(cuMemUnmap_(shown, piece));
    CHECK_DRIVER(cuMemRelease_(handle));
    CHECK_DRIVER(cuMemAddressFree_(shown, piece));

    // Unmaps the second piece and maps new memory there; the others keep their content.
    CHECK_DRIVER(cuMemUnmap_(range + piece, piece));
    unsigned first = 0, last = 0;
    CHECK(cudaMemcpy(&first, reinterpret_cast<void *>(range + 4), sizeof first, cudaMemcpyDeviceToHost));
    EXPECT(first == 7 + pieces - 1);
    CHECK_DRIVER(cuMemCreate_(&handles[1], piece, &properties, 0));
    CHECK_DRIVER(cuMemMap_(range + piece, piece, 0, handles[1], 0));
    CHECK_DRIVER(cuMemSetAccess_(range + piece, piece, &access, 1));
    CHECK(cudaMemset(reinterpret_cast<void *>(range + piece), 0x11, piece));
    CHECK(cudaMemcpy(&first, reinterpret_cast<void *>(range + piece), sizeof first, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&last, reinterpret_cast<void *>(range + 2 * piece), sizeof last, cudaMemcpyDeviceToHost));
    EXPECT(first == 0x11111111u);
    EXPECT(last == unsigned(2 * piece / sizeof(unsigned)) * 7u + pieces - 1);
    CHECK_DRIVER(cuMemUnmap_(range, pieces * piece));
    CHECK_DRIVER(cuMemRelease_(handles[1]));
    CHECK_DRIVER(cuMemAddressFree_(range, pieces * piece));
    std::printf("vmm: %zu pieces mapped, replaced and unmapped\n", pieces);
    return 0;
}

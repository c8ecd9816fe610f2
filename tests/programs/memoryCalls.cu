// Calls about memory that no other program makes: pitched and pinned memory and their flags, fills
// of boxes, copies of boxes, memory from a pool, advice and places of managed memory, properties of
// mapped memory.
#include "driver.h"

#include <cstring>
#include <vector>

static void on_host() {
    typedef CUresult (*AllocHost)(void **, size_t);
    DRIVER(cuMemHostAlloc);
    DRIVER(cuMemHostGetFlags);
    DRIVER(cuMemFreeHost);
    auto alloc = reinterpret_cast<AllocHost>(driver_symbol("cuMemAllocHost_v2"));
    void *plain, *mapped;
    unsigned flags = 99;
    CHECK_DRIVER(alloc(&plain, 1 << 16));
    std::memset(plain, 1, 1 << 16);
    CHECK_DRIVER(cuMemHostGetFlags_(&flags, plain));
    std::printf("plain: flags %#x\n", flags);
    CHECK_DRIVER(cuMemHostAlloc_(&mapped, 1 << 16, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_WRITECOMBINED));
    CHECK_DRIVER(cuMemHostGetFlags_(&flags, mapped));
    std::printf("portable, write-combined: flags %#x\n", flags);
    CHECK_DRIVER(cuMemHostGetFlags_(&flags, static_cast<char *>(mapped) + 100));
    std::printf("inside: flags %#x\n", flags);
    int local;
    SHOW_DRIVER(cuMemHostGetFlags_(&flags, &local));
    CHECK_DRIVER(cuMemFreeHost_(plain));
    CHECK_DRIVER(cuMemFreeHost_(mapped));
}

static void boxes() {
    const size_t WIDTH = 100, HEIGHT = 20;
    DRIVER(cuMemAllocPitch);
    DRIVER(cuMemFree);
    DRIVER(cuMemsetD8);
    DRIVER(cuMemsetD2D8);
    DRIVER(cuMemsetD2D16);
    DRIVER(cuMemsetD2D32);
    DRIVER(cuMemsetD2D8Async);
    DRIVER(cuMemsetD2D16Async);
    DRIVER(cuMemsetD2D32Async);
    DRIVER(cuMemcpy2DUnaligned);
    DRIVER(cuMemcpy3D);
    DRIVER(cuStreamSynchronize);
    CUdeviceptr memory;
    size_t pitch = 0;
    CHECK_DRIVER(cuMemAllocPitch_(&memory, &pitch, WIDTH, HEIGHT, 4));
    EXPECT(pitch >= WIDTH && pitch % 4 == 0);
    // A refused call may write its results.
    CUdeviceptr none;
    size_t no_pitch;
    SHOW_DRIVER(cuMemAllocPitch_(&none, &no_pitch, WIDTH, HEIGHT, 3));
    CHECK_DRIVER(cuMemsetD8_(memory, 0xee, pitch * HEIGHT));
    CHECK(cudaDeviceSynchronize());
    CHECK_DRIVER(cuMemsetD2D8_(memory, pitch, 1, WIDTH, HEIGHT / 2));
    CHECK_DRIVER(cuMemsetD2D16_(memory + 10, pitch, 0x0202, 20, 5));
    CHECK_DRIVER(cuMemsetD2D32_(memory + 12, pitch, 0x03030303, 5, 3));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUdeviceptr lower = memory + 10 * pitch;
    CHECK_DRIVER(cuMemsetD2D8Async_(lower, pitch, 4, WIDTH, 10, stream));
    CHECK_DRIVER(cuMemsetD2D16Async_(lower + 10, pitch, 0x0505, 20, 5, stream));
    CHECK_DRIVER(cuMemsetD2D32Async_(lower + 12, pitch, 0x06060606, 5, 3, stream));
    CHECK_DRIVER(cuStreamSynchronize_(stream));
    SHOW_DRIVER(cuMemsetD2D16_(memory + 1, pitch, 0, 4, 2));
    SHOW_DRIVER(cuMemsetD2D32_(memory, 2, 0, 4, 2));
    std::vector<unsigned char> back(WIDTH * HEIGHT);
    CUDA_MEMCPY2D copy = {};
    copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = memory;
    copy.srcPitch = pitch;
    copy.dstMemoryType = CU_MEMORYTYPE_HOST;
    copy.dstHost = back.data();
    copy.dstPitch = WIDTH;
    copy.WidthInBytes = WIDTH;
    copy.Height = HEIGHT;
    CHECK_DRIVER(cuMemcpy2DUnaligned_(&copy));
    for (size_t y = 0; y < HEIGHT; y++)
        for (size_t x = 0; x < WIDTH; x++) {
            size_t row = y % 10;
            int kind = row < 3 && x >= 12 && x < 32 ? 2 : row < 5 && x >= 10 && x < 50 ? 1 : 0;
            EXPECT(back[y * WIDTH + x] == 1 + kind + (y < 10 ? 0 : 3));
        }
    // A box of two layers of ten lines, of which it takes some columns.
    CUDA_MEMCPY3D box = {};
    box.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    box.srcDevice = memory;
    box.srcPitch = pitch;
    box.srcHeight = 10;
    box.srcXInBytes = 10;
    box.srcY = 1;
    box.dstMemoryType = CU_MEMORYTYPE_HOST;
    box.dstHost = back.data();
    box.dstPitch = 8;
    box.dstHeight = 4;
    box.WidthInBytes = 8;
    box.Height = 4;
    box.Depth = 2;
    CHECK_DRIVER(cuMemcpy3D_(&box));
    for (size_t i = 0; i < 64; i++) {
        size_t x = i % 8 + 10, row = i / 8 % 4 + 1;
        EXPECT(back[i] == (row < 3 && x >= 12 ? 3 : row < 5 ? 2 : 1) + (i < 32 ? 0 : 3));
    }
    CHECK(cudaStreamDestroy(stream));
    CHECK_DRIVER(cuMemFree_(memory));
    std::printf("memoryCalls: boxes right\n");
}

static void pools() {
    DRIVER(cuMemPoolCreate);
    DRIVER(cuMemPoolDestroy);
    DRIVER(cuMemAllocFromPoolAsync);
    DRIVER(cuMemFreeAsync);
    DRIVER(cuMemsetD32Async);
    DRIVER(cuMemcpyDtoH);
    CUmemPoolProps properties = {};
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemoryPool pool;
    CHECK_DRIVER(cuMemPoolCreate_(&pool, &properties));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUdeviceptr memory[2];
    for (int i = 0; i < 2; i++) {
        CHECK_DRIVER(cuMemAllocFromPoolAsync_(&memory[i], 4096, pool, stream));
        CHECK_DRIVER(cuMemsetD32Async_(memory[i], 7 + i, 1024, stream));
    }
    CHECK(cudaStreamSynchronize(stream));
    std::vector<unsigned> back(1024);
    for (unsigned i = 0; i < 2; i++) {
        CHECK_DRIVER(cuMemcpyDtoH_(back.data(), memory[i], 4096));
        for (unsigned value : back) EXPECT(value == 7 + i);
        CHECK_DRIVER(cuMemFreeAsync_(memory[i], stream));
    }
    CHECK(cudaStreamSynchronize(stream));
    CHECK_DRIVER(cuMemPoolDestroy_(pool));
    CHECK(cudaStreamDestroy(stream));
    std::printf("memoryCalls: pools right\n");
}

static void managed() {
    // The forms that name a device, and those that name a location.
    typedef CUresult (*Advise)(CUdeviceptr, size_t, CUmem_advise, CUdevice);
    typedef CUresult (*AdviseAt)(CUdeviceptr, size_t, CUmem_advise, CUmemLocation);
    typedef CUresult (*Prefetch)(CUdeviceptr, size_t, CUdevice, CUstream);
    typedef CUresult (*PrefetchTo)(CUdeviceptr, size_t, CUmemLocation, unsigned, CUstream);
    DRIVER(cuMemAllocManaged);
    DRIVER(cuMemFree);
    DRIVER(cuStreamAttachMemAsync);
    DRIVER(cuMemsetD8);
    auto advise = reinterpret_cast<Advise>(driver_symbol("cuMemAdvise"));
    auto advise_at = reinterpret_cast<AdviseAt>(driver_symbol("cuMemAdvise_v2"));
    auto prefetch = reinterpret_cast<Prefetch>(driver_symbol("cuMemPrefetchAsync"));
    auto prefetch_to = reinterpret_cast<PrefetchTo>(driver_symbol("cuMemPrefetchAsync_v2"));
    const size_t SIZE = 1 << 20;
    CUdeviceptr memory;
    CHECK_DRIVER(cuMemAllocManaged_(&memory, SIZE, CU_MEM_ATTACH_GLOBAL));
    auto *bytes = reinterpret_cast<unsigned char *>(memory);
    std::memset(bytes, 3, SIZE);
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_DRIVER(advise(memory, SIZE, CU_MEM_ADVISE_SET_READ_MOSTLY, 0));
    CHECK_DRIVER(advise(memory, SIZE, CU_MEM_ADVISE_UNSET_READ_MOSTLY, 0));
    CUmemLocation device = {}, host = {};
    device.type = CU_MEM_LOCATION_TYPE_DEVICE;
    host.type = CU_MEM_LOCATION_TYPE_HOST;
    CHECK_DRIVER(advise_at(memory, SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, device));
    // A driver may refuse it where host and device may not use the memory at once; ours does not.
    int concurrent = 0;
    CHECK(cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, 0));
    CUresult there = prefetch(memory, SIZE, 0, stream);
    EXPECT(there == CUDA_SUCCESS || (!concurrent && there == CUDA_ERROR_INVALID_DEVICE));
    CHECK(cudaStreamSynchronize(stream));
    CHECK_DRIVER(cuMemsetD8_(memory, 4, SIZE / 2));
    CUresult back = prefetch_to(memory, SIZE, host, 0, stream);
    EXPECT(back == CUDA_SUCCESS || (!concurrent && back == CUDA_ERROR_INVALID_DEVICE));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaDeviceSynchronize());
    for (size_t i = 0; i < SIZE; i++) EXPECT(bytes[i] == (i < SIZE / 2 ? 4 : 3));
    CHECK_DRIVER(cuStreamAttachMemAsync_(stream, memory, 0, CU_MEM_ATTACH_SINGLE));
    CHECK(cudaStreamSynchronize(stream));
    CHECK_DRIVER(cuMemFree_(memory));
    CHECK(cudaStreamDestroy(stream));
    void *ordinary;
    CHECK(cudaMalloc(&ordinary, SIZE));
    SHOW_DRIVER(advise(reinterpret_cast<CUdeviceptr>(ordinary), SIZE, CU_MEM_ADVISE_SET_READ_MOSTLY, 0));
    SHOW_DRIVER(prefetch(reinterpret_cast<CUdeviceptr>(ordinary), SIZE, 0, nullptr));
    CHECK(cudaFree(ordinary));
    std::printf("memoryCalls: managed right\n");
}

static void places() {
    DRIVER(cuMemAllocManaged);
    DRIVER(cuMemFree);
    DRIVER(cuMemRangeGetAttribute);
    CUdeviceptr memory;
    CHECK_DRIVER(cuMemAllocManaged_(&memory, 1 << 16, CU_MEM_ATTACH_GLOBAL));
    int value = 99;
    CHECK_DRIVER(cuMemRangeGetAttribute_(&value, 4, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, memory, 1 << 16));
    std::printf("read mostly: %d\n", value);
    CHECK_DRIVER(cuMemRangeGetAttribute_(&value, 4, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, memory, 1 << 16));
    std::printf("preferred location: %d\n", value);
    SHOW_DRIVER(cuMemRangeGetAttribute_(&value, 3, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, memory, 1 << 16));
    // The simulated driver lacks the form for several attributes.
    DRIVER(cuMemRangeGetAttributes);
    int values[2] = {99, 99};
    void *data[2] = {&values[0], &values[1]};
    size_t sizes[2] = {4, 4};
    CUmem_range_attribute wanted[2] = {CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION};
    CUresult known = cuMemRangeGetAttributes_(data, sizes, wanted, 2, memory, 1 << 16);
    EXPECT(known == CUDA_ERROR_NOT_SUPPORTED || (known == CUDA_SUCCESS && values[0] == 0 && values[1] == value));
    CHECK_DRIVER(cuMemFree_(memory));
}

static void mapped() {
    DRIVER(cuMemGetAllocationGranularity);
    DRIVER(cuMemCreate);
    DRIVER(cuMemRelease);
    DRIVER(cuMemAddressReserve);
    DRIVER(cuMemAddressFree);
    DRIVER(cuMemMap);
    DRIVER(cuMemUnmap);
    DRIVER(cuMemSetAccess);
    DRIVER(cuMemRetainAllocationHandle);
    DRIVER(cuMemGetAllocationPropertiesFromHandle);
    DRIVER(cuMemsetD8);
    CUmemAllocationProp properties = {}, found = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    size_t size;
    CHECK_DRIVER(cuMemGetAllocationGranularity_(&size, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CUmemGenericAllocationHandle handle, again;
    CHECK_DRIVER(cuMemCreate_(&handle, size, &properties, 0));
    CHECK_DRIVER(cuMemGetAllocationPropertiesFromHandle_(&found, handle));
    std::printf("properties: type %d, location %d %d\n", int(found.type), int(found.location.type), found.location.id);
    CUdeviceptr address;
    CHECK_DRIVER(cuMemAddressReserve_(&address, size, 0, 0, 0));
    CHECK_DRIVER(cuMemMap_(address, size, 0, handle, 0));
    CUmemAccessDesc access = {};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CHECK_DRIVER(cuMemSetAccess_(address, size, &access, 1));
    CHECK_DRIVER(cuMemRetainAllocationHandle_(&again, reinterpret_cast<void *>(address + size / 2)));
    EXPECT(again == handle);
    // The mapping and the second reference keep the memory.
    CHECK_DRIVER(cuMemRelease_(handle));
    CHECK_DRIVER(cuMemGetAllocationPropertiesFromHandle_(&found, again));
    CHECK_DRIVER(cuMemRelease_(again));
    CHECK_DRIVER(cuMemsetD8_(address, 1, size));
    CHECK(cudaDeviceSynchronize());
    CHECK_DRIVER(cuMemUnmap_(address, size));
    SHOW_DRIVER(cuMemRetainAllocationHandle_(&again, reinterpret_cast<void *>(address)));
    CHECK_DRIVER(cuMemAddressFree_(address, size));
    std::printf("memoryCalls: mapped right\n");
}

int main() {
    CHECK(cudaFree(nullptr));
    on_host();
    boxes();
    pools();
    managed();
    places();
    mapped();
    return 0;
}

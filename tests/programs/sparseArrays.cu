// A sparse array: memory of a pool of tiles is mapped into one tile, used, and unmapped. The
// simulated driver has no sparse arrays.
#include "driver.h"

#include <numeric>
#include <vector>

namespace {

// Copies a box of an array to or from values.
CUDA_MEMCPY2D box(std::vector<int> &values, CUarray array, bool to_array, unsigned x, unsigned width, unsigned height) {
    CUDA_MEMCPY2D copy = {};
    copy.srcMemoryType = to_array ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_ARRAY;
    copy.dstMemoryType = to_array ? CU_MEMORYTYPE_ARRAY : CU_MEMORYTYPE_HOST;
    copy.srcHost = copy.dstHost = values.data();
    copy.srcPitch = copy.dstPitch = width * sizeof(int);
    copy.srcArray = copy.dstArray = array;
    (to_array ? copy.dstXInBytes : copy.srcXInBytes) = x * sizeof(int);
    copy.WidthInBytes = width * sizeof(int);
    copy.Height = height;
    return copy;
}

// Maps memory into a part of an array, or nothing.
void map(CUarray array, CUmemGenericAllocationHandle memory, unsigned x, unsigned width, unsigned height, cudaStream_t stream) {
    DRIVER(cuMemMapArrayAsync);
    CUarrayMapInfo part = {};
    part.resourceType = CU_RESOURCE_TYPE_ARRAY;
    part.resource.array = array;
    part.subresourceType = CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL;
    part.subresource.sparseLevel.offsetX = x;
    part.subresource.sparseLevel.extentWidth = width;
    part.subresource.sparseLevel.extentHeight = height;
    part.subresource.sparseLevel.extentDepth = 1;
    part.memOperationType = memory ? CU_MEM_OPERATION_TYPE_MAP : CU_MEM_OPERATION_TYPE_UNMAP;
    part.memHandleType = CU_MEM_HANDLE_TYPE_GENERIC;
    part.memHandle.memHandle = memory;
    part.deviceBitMask = 1;
    CHECK_DRIVER(cuMemMapArrayAsync_(&part, 1, stream));
    CHECK(cudaStreamSynchronize(stream));
}

// Uses a tile of an array of 1024 x 1024.
void use(cudaStream_t stream) {
    DRIVER(cuArray3DCreate);
    DRIVER(cuArrayDestroy);
    DRIVER(cuArrayGetSparseProperties);
    DRIVER(cuMemCreate);
    DRIVER(cuMemRelease);
    DRIVER(cuMemGetAllocationGranularity);
    DRIVER(cuMemcpy2D);
    CUDA_ARRAY3D_DESCRIPTOR description = {};
    description.Width = description.Height = 1024;
    description.Format = CU_AD_FORMAT_SIGNED_INT32;
    description.NumChannels = 1;
    description.Flags = CUDA_ARRAY3D_SPARSE;
    CUarray array;
    CHECK_DRIVER(cuArray3DCreate_(&array, &description));
    CUDA_ARRAY_SPARSE_PROPERTIES tiles = {};
    CHECK_DRIVER(cuArrayGetSparseProperties_(&tiles, array));
    const unsigned width = tiles.tileExtent.width, height = tiles.tileExtent.height;
    EXPECT(width > 0 && width <= 512 && height > 0 && height <= 1024);
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.allocFlags.usage = CU_MEM_CREATE_USAGE_TILE_POOL;
    size_t size = 0;
    CHECK_DRIVER(cuMemGetAllocationGranularity_(&size, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CUmemGenericAllocationHandle memory;
    CHECK_DRIVER(cuMemCreate_(&memory, size, &properties, 0));
    // The second tile of the first row.
    map(array, memory, width, width, height, stream);
    std::vector<int> values(width * height), back(width * height);
    std::iota(values.begin(), values.end(), 5);
    const CUDA_MEMCPY2D there = box(values, array, true, width, width, height);
    const CUDA_MEMCPY2D again = box(back, array, false, width, width, height);
    CHECK_DRIVER(cuMemcpy2D_(&there));
    CHECK_DRIVER(cuMemcpy2D_(&again));
    EXPECT(values == back);
    map(array, 0, width, width, height, stream);
    CHECK_DRIVER(cuMemRelease_(memory));
    CHECK_DRIVER(cuArrayDestroy_(array));
}

} // namespace

int main() {
    CHECK(cudaFree(nullptr));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    int supported = 0;
    CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrSparseCudaArraySupported, 0));
    if (supported) use(stream);
    CHECK(cudaStreamDestroy(stream));
    std::printf("sparseArrays: %s\n", supported ? "right" : "none on this card");
    return 0;
}

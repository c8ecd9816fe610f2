// A sparse array: memory of a pool of tiles is mapped into it, used, and unmapped. The simulated
// driver has no sparse arrays.
#include "driver.h"

#include <numeric>
#include <vector>

int main() {
    CHECK(cudaFree(nullptr));
    DRIVER(cuArray3DCreate);
    DRIVER(cuArrayDestroy);
    DRIVER(cuArrayGetSparseProperties);
    DRIVER(cuMemCreate);
    DRIVER(cuMemRelease);
    DRIVER(cuMemGetAllocationGranularity);
    DRIVER(cuMemMapArrayAsync);
    DRIVER(cuMemcpy2D);
    CUDA_ARRAY3D_DESCRIPTOR description = {};
    description.Width = description.Height = 1024;
    description.Format = CU_AD_FORMAT_SIGNED_INT32;
    description.NumChannels = 1;
    description.Flags = CUDA_ARRAY3D_SPARSE;
    CUarray array;
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    int sparse = 0;
    CHECK(cudaDeviceGetAttribute(&sparse, cudaDevAttrSparseCudaArraySupported, 0));
    CUresult made = sparse ? cuArray3DCreate_(&array, &description) : CUDA_ERROR_NOT_SUPPORTED;
    if (made != CUDA_ERROR_NOT_SUPPORTED) {
        CHECK_DRIVER(made);
        CUDA_ARRAY_SPARSE_PROPERTIES tiles = {};
        CHECK_DRIVER(cuArrayGetSparseProperties_(&tiles, array));
        const unsigned width = tiles.tileExtent.width, height = tiles.tileExtent.height;
        EXPECT(width > 0 && width <= 1024 && height > 0 && height <= 1024);
        CUmemAllocationProp properties = {};
        properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        properties.allocFlags.usage = CU_MEM_CREATE_USAGE_TILE_POOL;
        size_t size = 0;
        CHECK_DRIVER(cuMemGetAllocationGranularity_(&size, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
        CUmemGenericAllocationHandle memory;
        CHECK_DRIVER(cuMemCreate_(&memory, size, &properties, 0));
        // The second tile of the first row.
        CUarrayMapInfo map = {};
        map.resourceType = CU_RESOURCE_TYPE_ARRAY;
        map.resource.array = array;
        map.subresourceType = CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL;
        map.subresource.sparseLevel.offsetX = width;
        map.subresource.sparseLevel.extentWidth = width;
        map.subresource.sparseLevel.extentHeight = height;
        map.subresource.sparseLevel.extentDepth = 1;
        map.memOperationType = CU_MEM_OPERATION_TYPE_MAP;
        map.memHandleType = CU_MEM_HANDLE_TYPE_GENERIC;
        map.memHandle.memHandle = memory;
        map.deviceBitMask = 1;
        CHECK_DRIVER(cuMemMapArrayAsync_(&map, 1, stream));
        CHECK(cudaStreamSynchronize(stream));
        std::vector<int> values(width * height), back(width * height);
        std::iota(values.begin(), values.end(), 5);
        CUDA_MEMCPY2D copy = {};
        copy.srcMemoryType = CU_MEMORYTYPE_HOST;
        copy.srcHost = values.data();
        copy.srcPitch = width * sizeof(int);
        copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
        copy.dstArray = array;
        copy.dstXInBytes = width * sizeof(int);
        copy.WidthInBytes = width * sizeof(int);
        copy.Height = height;
        CHECK_DRIVER(cuMemcpy2D_(&copy));
        CUDA_MEMCPY2D other = {};
        other.srcMemoryType = CU_MEMORYTYPE_ARRAY;
        other.srcArray = array;
        other.srcXInBytes = width * sizeof(int);
        other.dstMemoryType = CU_MEMORYTYPE_HOST;
        other.dstHost = back.data();
        other.dstPitch = width * sizeof(int);
        other.WidthInBytes = width * sizeof(int);
        other.Height = height;
        CHECK_DRIVER(cuMemcpy2D_(&other));
        EXPECT(values == back);
        map.memOperationType = CU_MEM_OPERATION_TYPE_UNMAP;
        map.memHandle.memHandle = 0;
        CHECK_DRIVER(cuMemMapArrayAsync_(&map, 1, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK_DRIVER(cuMemRelease_(memory));
        CHECK_DRIVER(cuArrayDestroy_(array));
    }
    CHECK(cudaStreamDestroy(stream));
    std::printf("sparseArrays: right\n");
    return 0;
}

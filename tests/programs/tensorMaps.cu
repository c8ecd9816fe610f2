// Tensor maps: encoded in each form, with another address, with another class of allocation.
// No kernel uses them, so a card without such an engine encodes them, too.
#include "driver.h"

#include <cstring>

#if CUDA_VERSION >= 12080

static bool same(const CUtensorMap &a, const CUtensorMap &b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// A change of the address, and the change back.
static void replace(CUtensorMap map, void *address, void *other) {
    DRIVER(cuTensorMapReplaceAddress);
    const CUtensorMap original = map;
    CHECK_DRIVER(cuTensorMapReplaceAddress_(&map, other));
    EXPECT(!same(map, original));
    CHECK_DRIVER(cuTensorMapReplaceAddress_(&map, address));
    EXPECT(same(map, original));
}

// A call of CUDA 13.5, which older drivers do not have.
static void set_class(CUtensorMap map) {
    typedef CUresult (*SetClass)(CUtensorMap *, int, int *);
    auto set = reinterpret_cast<SetClass>(driver_symbol_if("cuTensorMapSetAllocationClass"));
    const int small = 1, large = 2;
    int now = 0;
    CUresult done = set ? set(&map, small, &now) : CUDA_ERROR_NOT_SUPPORTED;
    if (done == CUDA_ERROR_NOT_SUPPORTED) return;
    CHECK_DRIVER(done);
    EXPECT(now == small);
    CHECK_DRIVER(set(&map, large, &now));
    EXPECT(now == small || now == large);
    EXPECT(set(&map, 77, &now) != CUDA_SUCCESS && now == small);
}

int main() {
    char *device;
    CHECK(cudaMalloc(&device, 1 << 20));
    DRIVER(cuTensorMapEncodeTiled);
    DRIVER(cuTensorMapEncodeIm2col);
    const cuuint64_t sizes[] = {64, 32, 16, 4}, strides[] = {128, 4096, 65536};
    const cuuint32_t boxes[] = {32, 8, 2, 1}, steps[] = {1, 1, 1, 1};
    const int lower[] = {0, 0}, upper[] = {0, 0};
    alignas(64) CUtensorMap tiled, im2col, wide;
    CUresult first = cuTensorMapEncodeTiled_(
        &tiled, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, device, sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (first != CUDA_ERROR_NOT_SUPPORTED) {
        CHECK_DRIVER(first);
        replace(tiled, device, device + 4096);
        CHECK_DRIVER(cuTensorMapEncodeIm2col_(&im2col, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, device, sizes, strides, lower,
                                              upper, 32, 16, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                              CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
        replace(im2col, device, device + 4096);
        set_class(tiled);
        // The wide form needs compute capability 10.0.
        DRIVER(cuTensorMapEncodeIm2colWide);
        CUresult made = cuTensorMapEncodeIm2colWide_(
            &wide, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, device, sizes, strides, 0, 0, 32, 16, steps,
            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_IM2COL_WIDE_MODE_W, CU_TENSOR_MAP_SWIZZLE_128B,
            CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (made == CUDA_SUCCESS) replace(wide, device, device + 4096);
        std::printf("tensorMaps: the wide form returns %d\n", int(made));
        EXPECT(cuTensorMapEncodeTiled_(&tiled, CU_TENSOR_MAP_DATA_TYPE_UINT16, 9, device, sizes, strides, boxes, steps,
                                       CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                       CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS);
    }
    CHECK(cudaFree(device));
    std::printf("tensorMaps: right\n");
    return 0;
}

#else

int main() {
    std::printf("tensorMaps: right\n");
    return 0;
}

#endif

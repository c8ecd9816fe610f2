// Texture references of the driver interface, which old programs still use: their properties, and
// a kernel that reads memory through one.
#define CUDA_ENABLE_DEPRECATED
#include "driver.h"

#include <numeric>
#include <vector>

const char *IMAGE = R"(
.version 6.5
.target sm_75
.address_size 64
.global .texref image;
.visible .entry fetch(.param .u64 to) {
    .reg .u64 %rd<4>;
    .reg .u32 %r<2>;
    .reg .f32 %f<4>;
    ld.param.u64 %rd1, [to];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r1, %tid.x;
    tex.1d.v4.f32.s32 {%f0, %f1, %f2, %f3}, [image, {%r1}];
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd3, %rd1, %rd2;
    st.global.f32 [%rd3], %f0;
    ret;
})";

static void properties(char *device) {
    DRIVER(cuTexRefCreate);
    DRIVER(cuTexRefDestroy);
    DRIVER(cuTexRefSetFormat);
    DRIVER(cuTexRefGetFormat);
    DRIVER(cuTexRefSetAddressMode);
    DRIVER(cuTexRefGetAddressMode);
    DRIVER(cuTexRefSetFilterMode);
    DRIVER(cuTexRefGetFilterMode);
    DRIVER(cuTexRefSetMipmapFilterMode);
    DRIVER(cuTexRefGetMipmapFilterMode);
    DRIVER(cuTexRefSetMipmapLevelBias);
    DRIVER(cuTexRefGetMipmapLevelBias);
    DRIVER(cuTexRefSetMipmapLevelClamp);
    DRIVER(cuTexRefGetMipmapLevelClamp);
    DRIVER(cuTexRefSetMaxAnisotropy);
    DRIVER(cuTexRefGetMaxAnisotropy);
    DRIVER(cuTexRefSetBorderColor);
    DRIVER(cuTexRefGetBorderColor);
    DRIVER(cuTexRefSetFlags);
    DRIVER(cuTexRefGetFlags);
    DRIVER(cuTexRefSetAddress);
    DRIVER(cuTexRefGetAddress);
    DRIVER(cuTexRefSetAddress2D);
    CUtexref reference, other;
    CHECK_DRIVER(cuTexRefCreate_(&reference));
    CHECK_DRIVER(cuTexRefCreate_(&other));
    EXPECT(reference != other);

    CUarray_format format;
    int channels, anisotropy;
    CHECK_DRIVER(cuTexRefSetFormat_(other, CU_AD_FORMAT_UNSIGNED_INT8, 4));
    CHECK_DRIVER(cuTexRefSetFormat_(reference, CU_AD_FORMAT_FLOAT, 2));
    CHECK_DRIVER(cuTexRefGetFormat_(&format, &channels, reference));
    EXPECT(format == CU_AD_FORMAT_FLOAT && channels == 2);
    CHECK_DRIVER(cuTexRefGetFormat_(&format, &channels, other));
    EXPECT(format == CU_AD_FORMAT_UNSIGNED_INT8 && channels == 4);

    CUaddress_mode mode;
    CUfilter_mode filter;
    CHECK_DRIVER(cuTexRefSetAddressMode_(reference, 1, CU_TR_ADDRESS_MODE_MIRROR));
    CHECK_DRIVER(cuTexRefGetAddressMode_(&mode, reference, 1));
    EXPECT(mode == CU_TR_ADDRESS_MODE_MIRROR);
    CHECK_DRIVER(cuTexRefSetFilterMode_(reference, CU_TR_FILTER_MODE_LINEAR));
    CHECK_DRIVER(cuTexRefGetFilterMode_(&filter, reference));
    EXPECT(filter == CU_TR_FILTER_MODE_LINEAR);
    CHECK_DRIVER(cuTexRefSetMipmapFilterMode_(reference, CU_TR_FILTER_MODE_LINEAR));
    CHECK_DRIVER(cuTexRefGetMipmapFilterMode_(&filter, reference));
    EXPECT(filter == CU_TR_FILTER_MODE_LINEAR);

    float bias = 0, least = 0, most = 0;
    CHECK_DRIVER(cuTexRefSetMipmapLevelBias_(reference, 1.5f));
    CHECK_DRIVER(cuTexRefGetMipmapLevelBias_(&bias, reference));
    EXPECT(bias == 1.5f);
    CHECK_DRIVER(cuTexRefSetMipmapLevelClamp_(reference, 0.5f, 2.25f));
    CHECK_DRIVER(cuTexRefGetMipmapLevelClamp_(&least, &most, reference));
    EXPECT(least == 0.5f && most == 2.25f);
    CHECK_DRIVER(cuTexRefSetMaxAnisotropy_(reference, 4));
    CHECK_DRIVER(cuTexRefGetMaxAnisotropy_(&anisotropy, reference));
    EXPECT(anisotropy == 4);
    float color[4] = {0.25f, 0.5f, 0.75f, 1}, back[4] = {};
    CHECK_DRIVER(cuTexRefSetBorderColor_(reference, color));
    CHECK_DRIVER(cuTexRefGetBorderColor_(back, reference));
    for (int i = 0; i < 4; i++) EXPECT(back[i] == color[i]);
    unsigned flags = 0;
    CHECK_DRIVER(cuTexRefSetFlags_(reference, CU_TRSF_NORMALIZED_COORDINATES));
    CHECK_DRIVER(cuTexRefGetFlags_(&flags, reference));
    EXPECT(flags & CU_TRSF_NORMALIZED_COORDINATES);

    // An address is bound up to the alignment of textures; the rest is an offset.
    const CUdeviceptr address = reinterpret_cast<CUdeviceptr>(device);
    CUdeviceptr bound = 0;
    size_t offset = 99;
    CHECK_DRIVER(cuTexRefSetAddress_(&offset, other, address, 4096));
    CHECK_DRIVER(cuTexRefGetAddress_(&bound, other));
    EXPECT(offset == 0 && bound == address);
    CHECK_DRIVER(cuTexRefSetAddress_(&offset, other, address + 4, 1024));
    CHECK_DRIVER(cuTexRefGetAddress_(&bound, other));
    EXPECT(bound + offset == address + 4);
    CUDA_ARRAY_DESCRIPTOR description = {};
    description.Width = 64;
    description.Height = 16;
    description.Format = CU_AD_FORMAT_UNSIGNED_INT8;
    description.NumChannels = 4;
    CHECK_DRIVER(cuTexRefSetAddress2D_(other, &description, address, 256));
    CHECK_DRIVER(cuTexRefGetAddress_(&bound, other));
    EXPECT(bound == address);
    CHECK_DRIVER(cuTexRefDestroy_(other));
    CHECK_DRIVER(cuTexRefDestroy_(reference));
    std::printf("textureReferences: properties right\n");
}

static void arrays() {
    DRIVER(cuTexRefCreate);
    DRIVER(cuTexRefDestroy);
    DRIVER(cuTexRefSetArray);
    DRIVER(cuTexRefGetArray);
    DRIVER(cuArrayCreate);
    DRIVER(cuArrayDestroy);
    CUDA_ARRAY_DESCRIPTOR description = {};
    description.Width = description.Height = 64;
    description.Format = CU_AD_FORMAT_FLOAT;
    description.NumChannels = 1;
    CUarray array, found;
    CUtexref reference;
    CHECK_DRIVER(cuArrayCreate_(&array, &description));
    CHECK_DRIVER(cuTexRefCreate_(&reference));
    CHECK_DRIVER(cuTexRefSetArray_(reference, array, CU_TRSA_OVERRIDE_FORMAT));
    CHECK_DRIVER(cuTexRefGetArray_(&found, reference));
    EXPECT(found == array);
    CHECK_DRIVER(cuTexRefDestroy_(reference));
    CHECK_DRIVER(cuArrayDestroy_(array));
    std::printf("textureReferences: arrays right\n");
}

static void kernel(char *device) {
    DRIVER(cuModuleLoadData);
    DRIVER(cuModuleUnload);
    DRIVER(cuModuleGetFunction);
    DRIVER(cuModuleGetTexRef);
    DRIVER(cuModuleGetSurfRef);
    DRIVER(cuTexRefSetAddress);
    DRIVER(cuTexRefSetFormat);
    DRIVER(cuTexRefSetFlags);
    DRIVER(cuLaunchKernel);
    CUmodule module;
    CHECK_DRIVER(cuModuleLoadData_(&module, IMAGE));
    CUtexref reference, again;
    CUsurfref surface;
    CUfunction function;
    CHECK_DRIVER(cuModuleGetFunction_(&function, module, "fetch"));
    CHECK_DRIVER(cuModuleGetTexRef_(&reference, module, "image"));
    CHECK_DRIVER(cuModuleGetTexRef_(&again, module, "image"));
    EXPECT(reference == again);
    EXPECT(cuModuleGetTexRef_(&again, module, "other") != CUDA_SUCCESS);
    EXPECT(cuModuleGetSurfRef_(&surface, module, "other") != CUDA_SUCCESS);
    const int COUNT = 256;
    std::vector<float> values(COUNT), back(COUNT);
    std::iota(values.begin(), values.end(), 3.f);
    CHECK(cudaMemcpy(device, values.data(), COUNT * sizeof(float), cudaMemcpyHostToDevice));
    CUdeviceptr from = reinterpret_cast<CUdeviceptr>(device), to = from + 65536;
    CHECK_DRIVER(cuTexRefSetFormat_(reference, CU_AD_FORMAT_FLOAT, 1));
    CHECK_DRIVER(cuTexRefSetFlags_(reference, CU_TRSF_READ_AS_INTEGER));
    CHECK_DRIVER(cuTexRefSetAddress_(nullptr, reference, from, COUNT * sizeof(float)));
    void *arguments[] = {&to};
    CHECK_DRIVER(cuLaunchKernel_(function, 1, 1, 1, COUNT, 1, 1, 0, nullptr, arguments, nullptr));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(back.data(), device + 65536, COUNT * sizeof(float), cudaMemcpyDeviceToHost));
    EXPECT(values == back);
    CHECK_DRIVER(cuModuleUnload_(module));
    std::printf("textureReferences: kernel right\n");
}

int main() {
    char *device;
    CHECK(cudaMalloc(&device, 1 << 20));
    properties(device);
    arrays();
    kernel(device);
    CHECK(cudaFree(device));
    return 0;
}

// Arrays, mipmapped arrays, textures and surfaces: their descriptions, and what kernels read and
// write through them.
#define CUDA_ENABLE_DEPRECATED
#include "driver.h"

#include <cstring>
#include <vector>

const unsigned WIDTH = 64, HEIGHT = 32;

__global__ void sample(cudaTextureObject_t texture, float step, float level, float4 *to) {
    const float x = (threadIdx.x - 4.f) * step, y = (blockIdx.x - 2.f) * step;
    to[blockIdx.x * blockDim.x + threadIdx.x] = tex2DLod<float4>(texture, x, y, level);
}

__global__ void fetch(cudaTextureObject_t texture, int *to) {
    to[threadIdx.x] = tex1Dfetch<int>(texture, int(threadIdx.x) - 1);
}

__global__ void layers(cudaTextureObject_t texture, float *to) {
    to[blockIdx.x * blockDim.x + threadIdx.x] = tex2DLayered<float>(texture, threadIdx.x + .5f, 1.5f, int(blockIdx.x));
}

__global__ void change(cudaSurfaceObject_t surface) {
    int value = surf2Dread<int>(surface, threadIdx.x * sizeof(int), blockIdx.x, cudaBoundaryModeZero);
    surf2Dwrite(value * 3 + 1, surface, threadIdx.x * sizeof(int), blockIdx.x, cudaBoundaryModeZero);
}

// Prints a digest of what a kernel has written.
static void digest(const char *what, const void *device, size_t bytes) {
    std::vector<unsigned char> host(bytes);
    CHECK(cudaMemcpy(host.data(), device, bytes, cudaMemcpyDeviceToHost));
    unsigned long long hash = 0xcbf29ce484222325;
    for (unsigned char byte : host) hash = (hash ^ byte) * 0x100000001b3;
    std::printf("%s: %016llx\n", what, hash);
}

static void show(const char *what, CUarray array) {
    DRIVER(cuArray3DGetDescriptor);
    DRIVER(cuArrayGetDescriptor);
    CUDA_ARRAY3D_DESCRIPTOR d;
    CHECK_DRIVER(cuArray3DGetDescriptor_(&d, array));
    std::printf("%s: %zu x %zu x %zu, format %#x, %u channels, flags %#x\n", what, d.Width, d.Height, d.Depth,
                unsigned(d.Format), d.NumChannels, d.Flags);
    CUDA_ARRAY_DESCRIPTOR flat;
    CUresult result = cuArrayGetDescriptor_(&flat, array);
    std::printf("flat -> %d\n", int(result));
    if (result == CUDA_SUCCESS) EXPECT(flat.Width == d.Width && flat.Height == d.Height && flat.Format == d.Format);
}

static CUDA_ARRAY3D_DESCRIPTOR described(size_t width, size_t height, size_t depth, int format, int channels, int flags) {
    CUDA_ARRAY3D_DESCRIPTOR d = {};
    d.Width = width;
    d.Height = height;
    d.Depth = depth;
    d.Format = CUarray_format(format);
    d.NumChannels = channels;
    d.Flags = flags;
    return d;
}

static void arrays() {
    DRIVER(cuArray3DCreate);
    DRIVER(cuArrayDestroy);
    DRIVER(cuArrayGetPlane);
    DRIVER(cuArrayGetMemoryRequirements);
    CUarray array, plane;
    auto d = described(WIDTH, HEIGHT, 0, CU_AD_FORMAT_FLOAT, 4, CUDA_ARRAY3D_SURFACE_LDST);
    CHECK_DRIVER(cuArray3DCreate_(&array, &d));
    show("plain", array);
    SHOW_DRIVER(cuArrayGetPlane_(&plane, array, 0));
    CUDA_ARRAY_MEMORY_REQUIREMENTS needs = {};
    SHOW_DRIVER(cuArrayGetMemoryRequirements_(&needs, array, 0));
    CHECK_DRIVER(cuArrayDestroy_(array));
    SHOW_DRIVER(cuArrayDestroy_(nullptr));
    d = described(WIDTH, 0, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0);
    CHECK_DRIVER(cuArray3DCreate_(&array, &d));
    show("line", array);
    CHECK_DRIVER(cuArrayDestroy_(array));
    d = described(16, 16, 16, CU_AD_FORMAT_HALF, 2, 0);
    CHECK_DRIVER(cuArray3DCreate_(&array, &d));
    show("volume", array);
    CHECK_DRIVER(cuArrayDestroy_(array));
    d = described(32, 32, 6, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_CUBEMAP);
    CHECK_DRIVER(cuArray3DCreate_(&array, &d));
    show("cube", array);
    CHECK_DRIVER(cuArrayDestroy_(array));
    for (int channels = 1; channels < 4; channels++)
        for (int flags : {0, CUDA_ARRAY3D_SURFACE_LDST, 0x100}) {
            d = described(256, 256, 0, CU_AD_FORMAT_NV12, channels, flags);
            CUresult made = cuArray3DCreate_(&array, &d);
            std::printf("planar, %d channels, flags %#x -> %d\n", channels, flags, int(made));
            if (made != CUDA_SUCCESS) continue;
            show("planar", array);
            for (int i = 0; i < 3; i++) {
                CUresult result = cuArrayGetPlane_(&plane, array, i);
                std::printf("plane %d -> %d\n", i, int(result));
                if (result == CUDA_SUCCESS) show("plane", plane);
            }
            CHECK_DRIVER(cuArrayDestroy_(array));
        }
    d = described(WIDTH, HEIGHT, 0, CU_AD_FORMAT_FLOAT, 4, CUDA_ARRAY3D_DEFERRED_MAPPING);
    CUresult made = cuArray3DCreate_(&array, &d);
    std::printf("without memory -> %d\n", int(made));
    if (made == CUDA_SUCCESS) {
        CHECK_DRIVER(cuArrayGetMemoryRequirements_(&needs, array, 0));
        std::printf("it needs %zu bytes, aligned to %zu\n", needs.size, needs.alignment);
        CHECK_DRIVER(cuArrayDestroy_(array));
    }
    d = described(0, HEIGHT, 0, CU_AD_FORMAT_FLOAT, 1, 0);
    SHOW_DRIVER(cuArray3DCreate_(&array, &d));
    d = described(WIDTH, HEIGHT, 0, CU_AD_FORMAT_FLOAT, 3, 0);
    SHOW_DRIVER(cuArray3DCreate_(&array, &d));
    d = described(WIDTH, HEIGHT, 0, 0x77, 1, 0);
    SHOW_DRIVER(cuArray3DCreate_(&array, &d));
    d = described(WIDTH, HEIGHT, 5, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_CUBEMAP);
    SHOW_DRIVER(cuArray3DCreate_(&array, &d));
}

// Fills an array of float4 with numbers of its own.
static void fill(CUarray array, unsigned width, unsigned height, float base) {
    DRIVER(cuMemcpy2D);
    std::vector<float> values(size_t(width) * height * 4);
    for (size_t i = 0; i < values.size(); i++) values[i] = base + float(i % 251) * .25f;
    CUDA_MEMCPY2D copy = {};
    copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = values.data();
    copy.srcPitch = copy.WidthInBytes = width * sizeof(float4);
    copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
    copy.dstArray = array;
    copy.Height = height;
    CHECK_DRIVER(cuMemcpy2D_(&copy));
}

static void show(const CUDA_TEXTURE_DESC &d) {
    std::printf("texture: modes %d %d %d, filter %d, flags %#x, anisotropy %u, mipmaps %d %g %g %g, border %g %g %g %g\n",
                int(d.addressMode[0]), int(d.addressMode[1]), int(d.addressMode[2]), int(d.filterMode), d.flags,
                d.maxAnisotropy, int(d.mipmapFilterMode), d.mipmapLevelBias, d.minMipmapLevelClamp, d.maxMipmapLevelClamp,
                d.borderColor[0], d.borderColor[1], d.borderColor[2], d.borderColor[3]);
}

static void show(const CUDA_RESOURCE_VIEW_DESC &d) {
    std::printf("view: format %#x, %zu x %zu x %zu, levels %u to %u, layers %u to %u\n", unsigned(d.format), d.width,
                d.height, d.depth, d.firstMipmapLevel, d.lastMipmapLevel, d.firstLayer, d.lastLayer);
}

static void mipmaps(float4 *to) {
    DRIVER(cuMipmappedArrayCreate);
    DRIVER(cuMipmappedArrayDestroy);
    DRIVER(cuMipmappedArrayGetLevel);
    DRIVER(cuMipmappedArrayGetMemoryRequirements);
    DRIVER(cuMipmappedArrayGetSparseProperties);
    DRIVER(cuTexObjectCreate);
    DRIVER(cuTexObjectDestroy);
    DRIVER(cuTexObjectGetResourceDesc);
    DRIVER(cuTexObjectGetTextureDesc);
    DRIVER(cuTexObjectGetResourceViewDesc);
    DRIVER(cuTexRefCreate);
    DRIVER(cuTexRefDestroy);
    DRIVER(cuTexRefSetMipmappedArray);
    DRIVER(cuTexRefGetMipmappedArray);
    CUmipmappedArray mipmap;
    auto d = described(WIDTH, HEIGHT, 0, CU_AD_FORMAT_FLOAT, 4, 0);
    CHECK_DRIVER(cuMipmappedArrayCreate_(&mipmap, &d, 4));
    for (unsigned i = 0; i < 4; i++) {
        CUarray level;
        CHECK_DRIVER(cuMipmappedArrayGetLevel_(&level, mipmap, i));
        show("level", level);
        fill(level, WIDTH >> i, HEIGHT >> i, 100.f * i);
    }
    CUarray none;
    SHOW_DRIVER(cuMipmappedArrayGetLevel_(&none, mipmap, 4));
    CUDA_ARRAY_MEMORY_REQUIREMENTS needs = {};
    SHOW_DRIVER(cuMipmappedArrayGetMemoryRequirements_(&needs, mipmap, 0));
    CUDA_ARRAY_SPARSE_PROPERTIES sparse = {};
    SHOW_DRIVER(cuMipmappedArrayGetSparseProperties_(&sparse, mipmap));

    CUDA_RESOURCE_DESC resource = {}, same = {};
    resource.resType = CU_RESOURCE_TYPE_MIPMAPPED_ARRAY;
    resource.res.mipmap.hMipmappedArray = mipmap;
    CUDA_TEXTURE_DESC texture = {}, found = {};
    texture.addressMode[0] = CU_TR_ADDRESS_MODE_WRAP;
    texture.addressMode[1] = CU_TR_ADDRESS_MODE_MIRROR;
    texture.addressMode[2] = CU_TR_ADDRESS_MODE_CLAMP;
    texture.filterMode = texture.mipmapFilterMode = CU_TR_FILTER_MODE_LINEAR;
    texture.flags = CU_TRSF_NORMALIZED_COORDINATES;
    texture.maxAnisotropy = 2;
    texture.maxMipmapLevelClamp = 3;
    CUtexObject object;
    CHECK_DRIVER(cuTexObjectCreate_(&object, &resource, &texture, nullptr));
    CHECK_DRIVER(cuTexObjectGetResourceDesc_(&same, object));
    EXPECT(same.resType == CU_RESOURCE_TYPE_MIPMAPPED_ARRAY && same.res.mipmap.hMipmappedArray == mipmap);
    CHECK_DRIVER(cuTexObjectGetTextureDesc_(&found, object));
    show(found);
    for (float level : {0.f, .5f, 1.75f, 3.f}) {
        sample<<<16, 64>>>(object, .031f, level, to);
        digest("mipmap", to, 1024 * sizeof(float4));
    }
    CUDA_RESOURCE_VIEW_DESC view = {}, part = {};
    SHOW_DRIVER(cuTexObjectGetResourceViewDesc_(&part, object));
    CHECK_DRIVER(cuTexObjectDestroy_(object));
    view.format = CU_RES_VIEW_FORMAT_FLOAT_4X32;
    view.width = WIDTH;
    view.height = HEIGHT;
    view.firstMipmapLevel = 1;
    view.lastMipmapLevel = 2;
    CUresult viewed = cuTexObjectCreate_(&object, &resource, &texture, &view);
    std::printf("view of two levels -> %d\n", int(viewed));
    if (viewed == CUDA_SUCCESS) {
        CHECK_DRIVER(cuTexObjectGetResourceViewDesc_(&part, object));
        show(part);
        sample<<<16, 64>>>(object, .031f, 1, to);
        digest("view", to, 1024 * sizeof(float4));
        CHECK_DRIVER(cuTexObjectDestroy_(object));
    }
    view.width = WIDTH * 2;
    SHOW_DRIVER(cuTexObjectCreate_(&object, &resource, &texture, &view));

    CUtexref reference;
    CUmipmappedArray bound;
    CHECK_DRIVER(cuTexRefCreate_(&reference));
    CHECK_DRIVER(cuTexRefSetMipmappedArray_(reference, mipmap, CU_TRSA_OVERRIDE_FORMAT));
    CHECK_DRIVER(cuTexRefGetMipmappedArray_(&bound, reference));
    EXPECT(bound == mipmap);
    CHECK_DRIVER(cuTexRefDestroy_(reference));
    CHECK_DRIVER(cuMipmappedArrayDestroy_(mipmap));
    // No level, no memory, tiles.
    SHOW_DRIVER(cuMipmappedArrayCreate_(&mipmap, &d, 0));
    d = described(WIDTH, HEIGHT, 0, CU_AD_FORMAT_FLOAT, 4, CUDA_ARRAY3D_DEFERRED_MAPPING);
    CUresult made = cuMipmappedArrayCreate_(&mipmap, &d, 3);
    std::printf("levels without memory -> %d\n", int(made));
    if (made == CUDA_SUCCESS) {
        CHECK_DRIVER(cuMipmappedArrayGetMemoryRequirements_(&needs, mipmap, 0));
        std::printf("they need %zu bytes, aligned to %zu\n", needs.size, needs.alignment);
        CHECK_DRIVER(cuMipmappedArrayDestroy_(mipmap));
    }
    d = described(1024, 1024, 0, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_SPARSE);
    made = cuMipmappedArrayCreate_(&mipmap, &d, 5);
    std::printf("sparse levels -> %d\n", int(made));
    if (made != CUDA_SUCCESS) return;
    CHECK_DRIVER(cuMipmappedArrayGetSparseProperties_(&sparse, mipmap));
    std::printf("tiles of %u x %u x %u, tail from level %u: %llu bytes, flags %#x\n", sparse.tileExtent.width,
                sparse.tileExtent.height, sparse.tileExtent.depth, sparse.miptailFirstLevel,
                (unsigned long long)sparse.miptailSize, sparse.flags);
    CHECK_DRIVER(cuMipmappedArrayDestroy_(mipmap));
}

// Textures of linear memory, of memory with a pitch, and of layers.
static void textures(float4 *to) {
    DRIVER(cuTexObjectCreate);
    DRIVER(cuTexObjectDestroy);
    DRIVER(cuTexObjectGetResourceDesc);
    DRIVER(cuTexObjectGetTextureDesc);
    DRIVER(cuDeviceGetTexture1DLinearMaxWidth);
    DRIVER(cuArray3DCreate);
    DRIVER(cuArrayDestroy);
    DRIVER(cuMemcpy3D);
    size_t most = 0;
    CHECK_DRIVER(cuDeviceGetTexture1DLinearMaxWidth_(&most, CU_AD_FORMAT_FLOAT, 4, 0));
    std::printf("a texture of linear memory has at most %zu elements\n", most);
    SHOW_DRIVER(cuDeviceGetTexture1DLinearMaxWidth_(&most, CU_AD_FORMAT_FLOAT, 3, 0));
    std::vector<float> host(WIDTH * HEIGHT * 4);
    for (size_t i = 0; i < host.size(); i++) host[i] = float(i % 509) * .5f;
    char *memory;
    size_t pitch;
    CHECK(cudaMallocPitch(&memory, &pitch, WIDTH * sizeof(float4), HEIGHT));
    CHECK(cudaMemcpy2D(memory, pitch, host.data(), WIDTH * sizeof(float4), WIDTH * sizeof(float4), HEIGHT, cudaMemcpyHostToDevice));
    CUDA_RESOURCE_DESC resource = {}, same = {};
    CUDA_TEXTURE_DESC texture = {}, found = {};
    CUtexObject object;
    resource.resType = CU_RESOURCE_TYPE_LINEAR;
    resource.res.linear.devPtr = reinterpret_cast<CUdeviceptr>(memory);
    resource.res.linear.format = CU_AD_FORMAT_SIGNED_INT32;
    resource.res.linear.numChannels = 1;
    resource.res.linear.sizeInBytes = 62 * sizeof(int);
    texture.flags = CU_TRSF_READ_AS_INTEGER;
    CHECK_DRIVER(cuTexObjectCreate_(&object, &resource, &texture, nullptr));
    fetch<<<1, 64>>>(object, reinterpret_cast<int *>(to));
    digest("linear", to, 64 * sizeof(int));
    CHECK_DRIVER(cuTexObjectGetResourceDesc_(&same, object));
    EXPECT(same.res.linear.devPtr == resource.res.linear.devPtr && same.res.linear.sizeInBytes == 62 * sizeof(int));
    CHECK_DRIVER(cuTexObjectDestroy_(object));
    resource = {};
    resource.resType = CU_RESOURCE_TYPE_PITCH2D;
    resource.res.pitch2D.devPtr = reinterpret_cast<CUdeviceptr>(memory);
    resource.res.pitch2D.format = CU_AD_FORMAT_FLOAT;
    resource.res.pitch2D.numChannels = 4;
    resource.res.pitch2D.width = WIDTH;
    resource.res.pitch2D.height = HEIGHT;
    resource.res.pitch2D.pitchInBytes = pitch;
    texture = {};
    texture.addressMode[0] = texture.addressMode[1] = CU_TR_ADDRESS_MODE_BORDER;
    texture.filterMode = CU_TR_FILTER_MODE_LINEAR;
    for (int i = 0; i < 4; i++) texture.borderColor[i] = i + .5f;
    CHECK_DRIVER(cuTexObjectCreate_(&object, &resource, &texture, nullptr));
    CHECK_DRIVER(cuTexObjectGetTextureDesc_(&found, object));
    show(found);
    sample<<<16, 64>>>(object, 1.3f, 0, to);
    digest("pitch", to, 1024 * sizeof(float4));
    CHECK_DRIVER(cuTexObjectDestroy_(object));
    resource.res.pitch2D.devPtr += 4;
    SHOW_DRIVER(cuTexObjectCreate_(&object, &resource, &texture, nullptr));

    CUarray array;
    auto d = described(WIDTH, HEIGHT, 3, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_LAYERED);
    CHECK_DRIVER(cuArray3DCreate_(&array, &d));
    show("layers", array);
    CUDA_MEMCPY3D copy = {};
    copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = host.data();
    copy.srcPitch = copy.WidthInBytes = WIDTH * sizeof(float);
    copy.srcHeight = copy.Height = HEIGHT;
    copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
    copy.dstArray = array;
    copy.Depth = 3;
    CHECK_DRIVER(cuMemcpy3D_(&copy));
    resource = {};
    resource.resType = CU_RESOURCE_TYPE_ARRAY;
    resource.res.array.hArray = array;
    texture = {};
    CHECK_DRIVER(cuTexObjectCreate_(&object, &resource, &texture, nullptr));
    CHECK_DRIVER(cuTexObjectGetResourceDesc_(&same, object));
    EXPECT(same.resType == CU_RESOURCE_TYPE_ARRAY && same.res.array.hArray == array);
    layers<<<3, WIDTH>>>(object, reinterpret_cast<float *>(to));
    digest("layers", to, 3 * WIDTH * sizeof(float));
    CHECK_DRIVER(cuTexObjectDestroy_(object));
    CHECK_DRIVER(cuArrayDestroy_(array));
    CHECK(cudaFree(memory));
}

const char *SURFACE = R"(
.version 6.5
.target sm_75
.address_size 64
.global .surfref image;
.visible .entry store() {
    .reg .u32 %r<3>;
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    sust.b.2d.b32.zero [image, {%r2, %r1}], %r1;
    ret;
})";

static void surfaces(int *to) {
    DRIVER(cuArray3DCreate);
    DRIVER(cuArrayDestroy);
    DRIVER(cuSurfObjectCreate);
    DRIVER(cuSurfObjectDestroy);
    DRIVER(cuSurfObjectGetResourceDesc);
    DRIVER(cuSurfRefSetArray);
    DRIVER(cuSurfRefGetArray);
    DRIVER(cuModuleLoadData);
    DRIVER(cuModuleUnload);
    DRIVER(cuModuleGetSurfRef);
    DRIVER(cuModuleGetFunction);
    DRIVER(cuLaunchKernel);
    DRIVER(cuMemcpy2D);
    CUarray array, plain, bound;
    auto d = described(WIDTH, HEIGHT, 0, CU_AD_FORMAT_SIGNED_INT32, 1, CUDA_ARRAY3D_SURFACE_LDST);
    CHECK_DRIVER(cuArray3DCreate_(&array, &d));
    std::vector<int> values(WIDTH * HEIGHT);
    for (size_t i = 0; i < values.size(); i++) values[i] = int(i);
    CUDA_MEMCPY2D up = {}, down = {};
    up.srcMemoryType = CU_MEMORYTYPE_HOST;
    up.srcHost = values.data();
    up.srcPitch = up.WidthInBytes = down.dstPitch = down.WidthInBytes = WIDTH * sizeof(int);
    up.dstMemoryType = down.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    up.dstArray = down.srcArray = array;
    up.Height = down.Height = HEIGHT;
    down.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    down.dstDevice = reinterpret_cast<CUdeviceptr>(to);
    CHECK_DRIVER(cuMemcpy2D_(&up));
    CUDA_RESOURCE_DESC resource = {}, same = {};
    resource.resType = CU_RESOURCE_TYPE_ARRAY;
    resource.res.array.hArray = array;
    CUsurfObject object;
    CHECK_DRIVER(cuSurfObjectCreate_(&object, &resource));
    CHECK_DRIVER(cuSurfObjectGetResourceDesc_(&same, object));
    EXPECT(same.resType == CU_RESOURCE_TYPE_ARRAY && same.res.array.hArray == array);
    change<<<HEIGHT + 2, WIDTH + 2>>>(object);
    CHECK_DRIVER(cuMemcpy2D_(&down));
    digest("surface", to, WIDTH * HEIGHT * sizeof(int));
    CHECK_DRIVER(cuSurfObjectDestroy_(object));
    resource.resType = CU_RESOURCE_TYPE_LINEAR;
    SHOW_DRIVER(cuSurfObjectCreate_(&object, &resource));
    d.Flags = 0;
    CHECK_DRIVER(cuArray3DCreate_(&plain, &d));
    resource.resType = CU_RESOURCE_TYPE_ARRAY;
    resource.res.array.hArray = plain;
    SHOW_DRIVER(cuSurfObjectCreate_(&object, &resource));

    CUmodule module;
    CUsurfref reference;
    CUfunction store;
    CHECK_DRIVER(cuModuleLoadData_(&module, SURFACE));
    CHECK_DRIVER(cuModuleGetSurfRef_(&reference, module, "image"));
    SHOW_DRIVER(cuModuleGetSurfRef_(&reference, module, "nothing"));
    CHECK_DRIVER(cuModuleGetSurfRef_(&reference, module, "image"));
    SHOW_DRIVER(cuSurfRefSetArray_(reference, plain, 0));
    CHECK_DRIVER(cuSurfRefSetArray_(reference, array, 0));
    CHECK_DRIVER(cuSurfRefGetArray_(&bound, reference));
    EXPECT(bound == array);
    CHECK_DRIVER(cuModuleGetFunction_(&store, module, "store"));
    CHECK_DRIVER(cuLaunchKernel_(store, 1, 1, 1, HEIGHT, 1, 1, 0, nullptr, nullptr, nullptr));
    CHECK_DRIVER(cuMemcpy2D_(&down));
    digest("surface reference", to, WIDTH * HEIGHT * sizeof(int));
    CHECK_DRIVER(cuModuleUnload_(module));
    CHECK_DRIVER(cuArrayDestroy_(plain));
    CHECK_DRIVER(cuArrayDestroy_(array));
}

int main() {
    CHECK(cudaFree(nullptr));
    arrays();
    float4 *to;
    CHECK(cudaMalloc(&to, WIDTH * HEIGHT * sizeof(float4)));
    mipmaps(to);
    textures(to);
    surfaces(reinterpret_cast<int *>(to));
    CHECK(cudaFree(to));
    std::printf("textureObjects: done\n");
    return 0;
}

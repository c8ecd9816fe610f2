// Each value that kernels read through textures and surfaces is compared with one computed here:
// formats, address modes, filters, layers, faces and levels, as CUDA's documentation defines them.
#include "check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

const int WIDTH = 20, HEIGHT = 6, DEPTH = 3, ALL = WIDTH * HEIGHT * DEPTH;

template <class T>
__global__ void points(cudaTextureObject_t texture, T *to) {
    const int x = threadIdx.x, y = blockIdx.x, z = blockIdx.y, i = (z * HEIGHT + y) * WIDTH + x;
    to[i] = gridDim.y > 1 ? tex3D<T>(texture, x + .5f, y + .5f, z + .5f) : tex2D<T>(texture, x + .5f, y + .5f);
}

__global__ void layers(cudaTextureObject_t lines, cudaTextureObject_t planes, float *to) {
    const int x = threadIdx.x, y = blockIdx.x, z = blockIdx.y, i = (z * HEIGHT + y) * WIDTH + x;
    to[i] = tex2DLayered<float>(planes, x + .5f, y + .5f, z);
    if (y == 0) to[ALL + z * WIDTH + x] = tex1DLayered<float>(lines, x + .5f, z);
}

__global__ void line(cudaTextureObject_t texture, float step, float start, float *to) {
    to[threadIdx.x] = tex1D<float>(texture, start + step * threadIdx.x);
}

__global__ void between(cudaTextureObject_t texture, float z, float *to) {
    const float x = threadIdx.x * .37f, y = blockIdx.x * .61f;
    to[blockIdx.x * blockDim.x + threadIdx.x] = z < 0 ? tex2D<float>(texture, x, y) : tex3D<float>(texture, x, y, z);
}

__global__ void faces(cudaTextureObject_t texture, float *to) {
    const float d[6][3] = {{2, .1f, .2f}, {-2, .1f, .2f}, {.1f, 2, .2f}, {.1f, -2, .2f}, {.1f, .2f, 2}, {.1f, .2f, -2}};
    to[threadIdx.x] = texCubemap<float>(texture, d[threadIdx.x][0], d[threadIdx.x][1], d[threadIdx.x][2]);
}

__global__ void four(cudaTextureObject_t texture, float4 *to) {
    to[threadIdx.x] = tex2Dgather<float4>(texture, threadIdx.x + 1.f, 2.f, 0);
}

__global__ void levels(cudaTextureObject_t texture, float *to) {
    const float level = threadIdx.x * .25f, step = exp2f(level) / 16;
    to[threadIdx.x] = tex2DLod<float>(texture, .5f, .5f, level);
    to[threadIdx.x + 16] = tex2DGrad<float>(texture, .5f, .5f, make_float2(step, 0), make_float2(0, step));
}

// The first row is copied to the second one.
template <class T>
__global__ void planes(cudaSurfaceObject_t surface, T *to) {
    const int x = threadIdx.x * sizeof(T);
    to[threadIdx.x] = surf2Dread<T>(surface, x, 0);
    surf2Dwrite(to[threadIdx.x], surface, x, 1);
}

// The rows above and below a surface, and its sides.
__global__ void beyond(cudaSurfaceObject_t surface, int *to) {
    const int x = (int(threadIdx.x) - 2) * 4, y = int(blockIdx.x) - 2, i = blockIdx.x * blockDim.x + threadIdx.x;
    to[2 * i] = surf2Dread<int>(surface, x, y, cudaBoundaryModeZero);
    to[2 * i + 1] = surf2Dread<int>(surface, x, y, cudaBoundaryModeClamp);
}

__global__ void volumes(cudaSurfaceObject_t line, cudaSurfaceObject_t volume, cudaSurfaceObject_t layers, cudaSurfaceObject_t lines) {
    const int x = threadIdx.x * sizeof(float), y = blockIdx.x, z = blockIdx.y;
    surf3Dwrite(surf2DLayeredread<float>(layers, x, y, z) + 1000.f, volume, x, y, z);
    if (y == 0) {
        surf1DLayeredwrite(float(threadIdx.x + 100 * z), lines, x, z);
        if (z == 0) surf1Dwrite(threadIdx.x * 2.f, line, x);
    }
}

static int value(int i, int channel) { return (i * 7 + channel * 3) % 100; }

// An array with elements of type T, which hold the values above.
template <class T, class C>
static std::vector<T> values(int count) {
    std::vector<T> host(count);
    C *channels = reinterpret_cast<C *>(host.data());
    const int n = sizeof(T) / sizeof(C);
    for (int i = 0; i < count * n; i++) channels[i] = C(value(i / n, i % n));
    return host;
}

template <class T>
static cudaArray_t array(const std::vector<T> &host, int width, int height, int depth, unsigned flags,
                         cudaChannelFormatDesc format = cudaCreateChannelDesc<T>()) {
    cudaArray_t made;
    CHECK(cudaMalloc3DArray(&made, &format, make_cudaExtent(width, height, depth), flags));
    cudaMemcpy3DParms copy = {};
    const size_t rows = height ? height : 1, slices = depth ? depth : 1;
    copy.srcPtr = make_cudaPitchedPtr(const_cast<T *>(host.data()), width * sizeof(T), width, rows);
    copy.dstArray = made;
    copy.extent = make_cudaExtent(width, rows, slices);
    copy.kind = cudaMemcpyHostToDevice;
    CHECK(cudaMemcpy3D(&copy));
    return made;
}

template <class T>
static std::vector<T> content(cudaArray_t from, int width, int height, int depth) {
    std::vector<T> host(size_t(width) * height * depth);
    cudaMemcpy3DParms copy = {};
    copy.dstPtr = make_cudaPitchedPtr(host.data(), width * sizeof(T), width, height);
    copy.srcArray = from;
    copy.extent = make_cudaExtent(width, height, depth);
    copy.kind = cudaMemcpyDeviceToHost;
    CHECK(cudaMemcpy3D(&copy));
    return host;
}

static cudaTextureObject_t texture(cudaArray_t of, cudaTextureAddressMode mode, bool linear, bool normalized, bool fractions = false) {
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = of;
    cudaTextureDesc description = {};
    for (auto &one : description.addressMode) one = mode;
    description.filterMode = linear ? cudaFilterModeLinear : cudaFilterModePoint;
    description.readMode = fractions ? cudaReadModeNormalizedFloat : cudaReadModeElementType;
    description.normalizedCoords = normalized;
    cudaTextureObject_t object;
    CHECK(cudaCreateTextureObject(&object, &resource, &description, nullptr));
    return object;
}

static cudaSurfaceObject_t surface(cudaArray_t of) {
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = of;
    cudaSurfaceObject_t object;
    CHECK(cudaCreateSurfaceObject(&object, &resource));
    return object;
}

template <class T>
static std::vector<T> fetched(const void *device, size_t count) {
    std::vector<T> host(count);
    CHECK(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
}

template <class T, class C>
static void format(void *device) {
    for (int depth : {0, DEPTH}) {
        const int count = WIDTH * HEIGHT * (depth ? depth : 1);
        auto host = values<T, C>(count);
        cudaArray_t of = array(host, WIDTH, HEIGHT, depth, 0);
        cudaTextureObject_t object = texture(of, cudaAddressModeClamp, false, false);
        points<<<dim3(HEIGHT, depth ? depth : 1), WIDTH>>>(object, static_cast<T *>(device));
        EXPECT(!std::memcmp(fetched<T>(device, count).data(), host.data(), count * sizeof(T)));
        CHECK(cudaDestroyTextureObject(object));
        CHECK(cudaFreeArray(of));
    }
    const int count = WIDTH * HEIGHT;
    auto host = values<T, C>(count);
    cudaArray_t of = array(host, WIDTH, HEIGHT, 0, cudaArraySurfaceLoadStore);
    cudaSurfaceObject_t object = surface(of);
    planes<<<1, WIDTH>>>(object, static_cast<T *>(device));
    CHECK(cudaDeviceSynchronize());
    auto moved = content<T>(of, WIDTH, HEIGHT, 1);
    EXPECT(!std::memcmp(moved.data(), host.data(), WIDTH * sizeof(T)));
    EXPECT(!std::memcmp(&moved[WIDTH], host.data(), WIDTH * sizeof(T)));
    EXPECT(!std::memcmp(&moved[2 * WIDTH], &host[2 * WIDTH], 4 * WIDTH * sizeof(T)));
    CHECK(cudaDestroySurfaceObject(object));
    CHECK(cudaFreeArray(of));
}

template <class T, class C, class F>
static void fractions(void *device, float most) {
    const int count = WIDTH * HEIGHT, n = sizeof(T) / sizeof(C);
    auto host = values<T, C>(count);
    cudaArray_t of = array(host, WIDTH, HEIGHT, 0, 0);
    cudaTextureObject_t object = texture(of, cudaAddressModeClamp, false, false, true);
    points<<<dim3(HEIGHT, 1), WIDTH>>>(object, static_cast<F *>(device));
    auto back = fetched<float>(device, count * n);
    for (int i = 0; i < count * n; i++) EXPECT(std::fabs(back[i] - value(i / n, i % n) / most) < 1e-6f);
    CHECK(cudaDestroyTextureObject(object));
    CHECK(cudaFreeArray(of));
}

static void modes(float *device) {
    std::vector<float> host(16);
    for (int i = 0; i < 16; i++) host[i] = i + 1.f;
    cudaArray_t of = array(host, 16, 0, 0, 0);
    for (auto mode : {cudaAddressModeWrap, cudaAddressModeClamp, cudaAddressModeMirror, cudaAddressModeBorder}) {
        cudaTextureObject_t object = texture(of, mode, false, true);
        line<<<1, 80>>>(object, 1 / 16.f, (-32 + .5f) / 16, device);
        auto back = fetched<float>(device, 80);
        for (int i = 0; i < 80; i++) {
            const int at = i - 32, wrapped = (at + 64) % 16, twice = (at + 64) % 32;
            const int clamped = at < 0 ? 0 : at > 15 ? 15 : at;
            const float expected = mode == cudaAddressModeWrap     ? host[wrapped]
                                   : mode == cudaAddressModeClamp  ? host[clamped]
                                   : mode == cudaAddressModeMirror ? host[twice < 16 ? twice : 31 - twice]
                                                                   : (at == clamped ? host[at] : 0);
            EXPECT(back[i] == expected);
        }
        CHECK(cudaDestroyTextureObject(object));
    }
    CHECK(cudaFreeArray(of));
}

// A plane and a volume whose values rise evenly, so that a filter's result is known everywhere.
static void filters(float *device) {
    std::vector<float> host(ALL);
    for (int i = 0; i < ALL; i++) host[i] = i % WIDTH + i / WIDTH % HEIGHT * 8.f + i / WIDTH / HEIGHT * 32.f;
    auto inside = [](float v, int n) { return std::fmin(std::fmax(v - .5f, 0.f), n - 1.f); };
    for (float z : {-1.f, .2f, 1.3f, 2.9f}) {
        cudaArray_t of = array(host, WIDTH, HEIGHT, z < 0 ? 0 : DEPTH, 0);
        cudaTextureObject_t object = texture(of, cudaAddressModeClamp, true, false);
        between<<<12, 60>>>(object, z, device);
        auto back = fetched<float>(device, 720);
        for (int i = 0; i < 720; i++) {
            const float x = inside(i % 60 * .37f, WIDTH), y = inside(i / 60 * .61f, HEIGHT);
            EXPECT(std::fabs(back[i] - (x + 8 * y + (z < 0 ? 0 : 32 * inside(z, DEPTH)))) < 41 / 256.f);
        }
        CHECK(cudaDestroyTextureObject(object));
        CHECK(cudaFreeArray(of));
    }
}

static void stacks(float *device) {
    auto host = values<float, float>(ALL);
    cudaArray_t plane = array(host, WIDTH, HEIGHT, DEPTH, cudaArrayLayered);
    cudaArray_t row = array(host, WIDTH, 0, DEPTH, cudaArrayLayered);
    cudaTextureObject_t of_planes = texture(plane, cudaAddressModeClamp, false, false);
    cudaTextureObject_t of_rows = texture(row, cudaAddressModeClamp, false, false);
    layers<<<dim3(HEIGHT, DEPTH), WIDTH>>>(of_rows, of_planes, device);
    auto back = fetched<float>(device, ALL + WIDTH * DEPTH);
    EXPECT(!std::memcmp(back.data(), host.data(), ALL * sizeof(float)));
    EXPECT(!std::memcmp(&back[ALL], host.data(), WIDTH * DEPTH * sizeof(float)));
    CHECK(cudaDestroyTextureObject(of_planes));
    CHECK(cudaDestroyTextureObject(of_rows));
    CHECK(cudaFreeArray(plane));
    CHECK(cudaFreeArray(row));

    std::vector<float> sides(6 * 64);
    for (int i = 0; i < 6 * 64; i++) sides[i] = float(i / 64);
    cudaArray_t cube = array(sides, 8, 8, 6, cudaArrayCubemap);
    cudaTextureObject_t object = texture(cube, cudaAddressModeClamp, false, true);
    faces<<<1, 6>>>(object, device);
    back = fetched<float>(device, 6);
    for (int i = 0; i < 6; i++) EXPECT(back[i] == float(i));
    CHECK(cudaDestroyTextureObject(object));
    CHECK(cudaFreeArray(cube));

    cudaArray_t flat = array(host, WIDTH, HEIGHT, 0, cudaArrayTextureGather);
    object = texture(flat, cudaAddressModeClamp, false, false);
    four<<<1, WIDTH - 1>>>(object, reinterpret_cast<float4 *>(device));
    auto groups = fetched<float4>(device, WIDTH - 1);
    for (int x = 0; x < WIDTH - 1; x++) {
        const float *at = &host[WIDTH + x];
        EXPECT(groups[x].x == at[WIDTH] && groups[x].y == at[WIDTH + 1] && groups[x].z == at[1] && groups[x].w == at[0]);
    }
    CHECK(cudaDestroyTextureObject(object));
    CHECK(cudaFreeArray(flat));
}

static void mipmaps(float *device) {
    cudaMipmappedArray_t mipmap;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    CHECK(cudaMallocMipmappedArray(&mipmap, &format, make_cudaExtent(16, 16, 0), 4));
    for (int i = 0; i < 4; i++) {
        const int side = 16 >> i;
        std::vector<float> host(side * side, 10.f * i);
        cudaArray_t level;
        CHECK(cudaGetMipmappedArrayLevel(&level, mipmap, i));
        CHECK(cudaMemcpy2DToArray(level, 0, 0, host.data(), side * 4, side * 4, side, cudaMemcpyHostToDevice));
    }
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeMipmappedArray;
    resource.res.mipmap.mipmap = mipmap;
    cudaTextureDesc description = {};
    description.filterMode = description.mipmapFilterMode = cudaFilterModeLinear;
    description.normalizedCoords = 1;
    description.maxMipmapLevelClamp = 2.5f;
    cudaTextureObject_t object;
    CHECK(cudaCreateTextureObject(&object, &resource, &description, nullptr));
    levels<<<1, 16>>>(object, device);
    auto back = fetched<float>(device, 32);
    for (int i = 0; i < 16; i++) EXPECT(std::fabs(back[i] - std::fmin(i * 2.5f, 25.f)) < 20 / 256.f);
    // The level of a gradient is less exact.
    for (int i = 0; i < 16; i++) EXPECT(std::fabs(back[16 + i] - std::fmin(i * 2.5f, 25.f)) < 2);
    CHECK(cudaDestroyTextureObject(object));
    CHECK(cudaFreeMipmappedArray(mipmap));
}

static void surfaces(int *device) {
    auto numbers = values<int, int>(WIDTH * HEIGHT);
    cudaArray_t of = array(numbers, WIDTH, HEIGHT, 0, cudaArraySurfaceLoadStore);
    cudaSurfaceObject_t object = surface(of);
    beyond<<<HEIGHT + 4, WIDTH + 4>>>(object, device);
    auto back = fetched<int>(device, 2 * (HEIGHT + 4) * (WIDTH + 4));
    for (int i = 0; i < (HEIGHT + 4) * (WIDTH + 4); i++) {
        const int x = i % (WIDTH + 4) - 2, y = i / (WIDTH + 4) - 2;
        const int cx = std::min(std::max(x, 0), WIDTH - 1), cy = std::min(std::max(y, 0), HEIGHT - 1);
        EXPECT(back[2 * i] == (x == cx && y == cy ? numbers[y * WIDTH + x] : 0));
        EXPECT(back[2 * i + 1] == numbers[cy * WIDTH + cx]);
    }
    CHECK(cudaDestroySurfaceObject(object));
    CHECK(cudaFreeArray(of));

    auto host = values<float, float>(ALL);
    const unsigned layered = cudaArraySurfaceLoadStore | cudaArrayLayered;
    cudaArray_t made[4] = {array(host, WIDTH, 0, 0, cudaArraySurfaceLoadStore), array(host, WIDTH, HEIGHT, DEPTH, cudaArraySurfaceLoadStore),
                           array(host, WIDTH, HEIGHT, DEPTH, layered), array(host, WIDTH, 0, DEPTH, layered)};
    cudaSurfaceObject_t objects[4];
    for (int i = 0; i < 4; i++) objects[i] = surface(made[i]);
    volumes<<<dim3(HEIGHT, DEPTH), WIDTH>>>(objects[0], objects[1], objects[2], objects[3]);
    CHECK(cudaDeviceSynchronize());
    auto volume = content<float>(made[1], WIDTH, HEIGHT, DEPTH);
    for (int i = 0; i < ALL; i++) EXPECT(volume[i] == host[i] + 1000.f);
    auto single = content<float>(made[0], WIDTH, 1, 1), several = content<float>(made[3], WIDTH, 1, DEPTH);
    for (int i = 0; i < WIDTH; i++) EXPECT(single[i] == i * 2.f);
    for (int i = 0; i < WIDTH * DEPTH; i++) EXPECT(several[i] == float(i % WIDTH + i / WIDTH * 100));
    for (int i = 0; i < 4; i++) {
        CHECK(cudaDestroySurfaceObject(objects[i]));
        CHECK(cudaFreeArray(made[i]));
    }
}

int main() {
    void *device;
    CHECK(cudaMalloc(&device, 1 << 20));
    format<unsigned char, unsigned char>(device);
    format<uchar4, unsigned char>(device);
    format<short, short>(device);
    format<ushort2, unsigned short>(device);
    format<int, int>(device);
    format<uint4, unsigned>(device);
    format<float, float>(device);
    format<float2, float>(device);
    format<float4, float>(device);
    std::printf("textureValues: formats right\n");
    fractions<unsigned char, unsigned char, float>(device, 255);
    fractions<char4, signed char, float4>(device, 127);
    fractions<ushort2, unsigned short, float2>(device, 65535);
    modes(static_cast<float *>(device));
    filters(static_cast<float *>(device));
    std::printf("textureValues: fractions, modes and filters right\n");
    stacks(static_cast<float *>(device));
    mipmaps(static_cast<float *>(device));
    std::printf("textureValues: layers, faces and levels right\n");
    surfaces(static_cast<int *>(device));
    std::printf("textureValues: surfaces right\n");
    CHECK(cudaFree(device));
    return 0;
}

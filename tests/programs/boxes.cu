// 2D and 3D copies between pinned memory and pitched device memory, which need not wait.
//
// Every byte of a box arrives in its place, and no byte between its rows changes. Copies into some
// of the same host memory arrive in the stream's order. A copy behind a host function that waits
// for the calling thread does not wait in the call. Host functions and synchronizations see the
// bytes.
#include "driver.h"

#include <atomic>
#include <cstring>
#include <thread>

__host__ __device__ inline unsigned char pattern(size_t at, unsigned seed) {
    return static_cast<unsigned char>((at * 2654435761u + seed * 40503u) >> 13);
}

__global__ void fill(unsigned char *bytes, size_t count, unsigned seed) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        bytes[i] = pattern(i, seed);
}

struct Shape {
    size_t width, height, depth;
    size_t device_pitch, host_pitch;
    // Rows from one layer to the next.
    size_t device_rows, host_rows;
    // Place of the box.
    size_t x, y, z;

    size_t device_at(size_t x_, size_t y_, size_t z_) const {
        return ((z + z_) * device_rows + y + y_) * device_pitch + x + x_;
    }
    size_t host_at(size_t x_, size_t y_, size_t z_) const {
        return ((z + z_) * host_rows + y + y_) * host_pitch + x + x_;
    }
    size_t device_bytes() const { return device_pitch * device_rows * (z + depth); }
    size_t host_bytes() const { return host_pitch * host_rows * (z + depth); }
};

static cudaError_t copy(const Shape &s, unsigned char *device, unsigned char *host, cudaMemcpyKind kind,
                        cudaStream_t stream) {
    const bool down = kind == cudaMemcpyDeviceToHost;
    if (s.depth == 1 && s.z == 0) {
        unsigned char *there = device + s.device_at(0, 0, 0), *here = host + s.host_at(0, 0, 0);
        return down ? cudaMemcpy2DAsync(here, s.host_pitch, there, s.device_pitch, s.width, s.height, kind, stream)
                    : cudaMemcpy2DAsync(there, s.device_pitch, here, s.host_pitch, s.width, s.height, kind, stream);
    }
    cudaMemcpy3DParms p = {};
    const cudaPitchedPtr there = make_cudaPitchedPtr(device, s.device_pitch, s.device_pitch, s.device_rows);
    const cudaPitchedPtr here = make_cudaPitchedPtr(host, s.host_pitch, s.host_pitch, s.host_rows);
    p.srcPtr = down ? there : here;
    p.dstPtr = down ? here : there;
    p.srcPos = p.dstPos = make_cudaPos(s.x, s.y, s.z);
    p.extent = make_cudaExtent(s.width, s.height, s.depth);
    p.kind = kind;
    return cudaMemcpy3DAsync(&p, stream);
}

// Compares all bytes of `got`: those of the box with the device's, the others with `before`.
static void expect_box(int line, const Shape &s, const unsigned char *got, unsigned seed, unsigned char before,
                       bool there = false) {
    const size_t pitch = there ? s.device_pitch : s.host_pitch, rows = there ? s.device_rows : s.host_rows;
    for (size_t z = 0; z < s.z + s.depth; z++)
        for (size_t y = 0; y < rows; y++)
            for (size_t x = 0; x < pitch; x++) {
                const bool inside = x >= s.x && x < s.x + s.width && y >= s.y && y < s.y + s.height && z >= s.z;
                const size_t other = inside && !there ? s.device_at(x - s.x, y - s.y, z - s.z)
                                     : inside         ? s.host_at(x - s.x, y - s.y, z - s.z)
                                                      : 0;
                const unsigned char want = inside ? pattern(other, seed) : before;
                const size_t at = (z * rows + y) * pitch + x;
                if (got[at] == want) continue;
                std::printf("FAILED line %d: byte %zu of row %zu of layer %zu is %d, not %d\n", line, x, y, z, got[at],
                            want);
                std::exit(1);
            }
}

static void wait_for(void *data) {
    while (!static_cast<std::atomic<int> *>(data)->load()) std::this_thread::yield();
}

struct Work {
    unsigned char *bytes;
    size_t count;
    unsigned seed;
};

static void write(void *data) {
    const Work *work = static_cast<const Work *>(data);
    for (size_t i = 0; i < work->count; i++) work->bytes[i] = pattern(i, work->seed);
}

struct Look {
    const Shape *shape;
    const unsigned char *host;
    unsigned seed;
};

static void look_at(void *data) {
    const Look *look = static_cast<const Look *>(data);
    expect_box(__LINE__, *look->shape, look->host, look->seed, 0xee);
}

// A box that begins behind the first rows of the memory that the call names.
static void rows_within(unsigned char *device) {
    static auto copy = reinterpret_cast<CUresult (*)(const CUDA_MEMCPY2D *)>(driver_symbol("cuMemcpy2D_v2"));
    const size_t pitch = 512, width = 100, height = 10, first = 3, left = 8;
    fill<<<64, 256>>>(device, 64 * pitch, 77);
    CHECK(cudaDeviceSynchronize());
    static unsigned char host[64 * pitch];
    std::memset(host, 0, sizeof host);
    CUDA_MEMCPY2D box{};
    box.srcMemoryType = CU_MEMORYTYPE_DEVICE, box.srcDevice = CUdeviceptr(device);
    box.srcY = first, box.srcXInBytes = left, box.srcPitch = pitch;
    box.dstMemoryType = CU_MEMORYTYPE_DEVICE, box.dstDevice = CUdeviceptr(device) + 32 * pitch;
    box.dstY = 2 * first, box.dstXInBytes = 2 * left, box.dstPitch = pitch;
    box.WidthInBytes = width, box.Height = height;
    CHECK_DRIVER(copy(&box));
    CUDA_MEMCPY2D back = box;
    back.srcDevice = box.dstDevice, back.srcY = box.dstY, back.srcXInBytes = box.dstXInBytes;
    back.dstMemoryType = CU_MEMORYTYPE_HOST, back.dstHost = host, back.dstY = first, back.dstXInBytes = left;
    CHECK_DRIVER(copy(&back));
    for (size_t y = 0; y < 64; y++)
        for (size_t x = 0; x < pitch; x++) {
            const size_t at = y * pitch + x;
            const bool inside = y >= first && y < first + height && x >= left && x < left + width;
            EXPECT(host[at] == (inside ? pattern(at, 77) : 0));
        }
    std::printf("boxes: rows within memory right\n");
}

int main() {
    const Shape shapes[] = {
        {3, 5, 1, 512, 7, 5, 5, 0, 0, 0},
        {1, 3000, 1, 4, 9, 3000, 3000, 2, 0, 0},
        {640, 480, 1, 1024, 1000, 480, 480, 0, 0, 0},
        {1920 * 3, 1080, 1, 6144, 1920 * 3, 1080, 1080, 0, 0, 0},
        {(3 << 20) + 77, 3, 1, 4 << 20, (3 << 20) + 100, 3, 3, 21, 0, 0},
        {100, 7, 9, 128, 112, 11, 8, 5, 1, 2},
        {1000, 100, 33, 1024, 1001, 101, 103, 0, 0, 0},
        {64, 64, 200, 64, 64, 64, 64, 0, 0, 0},
        {13, 1, 30000, 16, 14, 1, 2, 0, 0, 1},
    };
    cudaStream_t one, two;
    CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking));
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    unsigned seed = 1;
    for (const Shape &s : shapes) {
        const size_t there = s.device_bytes(), here = s.host_bytes();
        unsigned char *device, *host, *all;
        CHECK(cudaMalloc(&device, there));
        CHECK(cudaMallocHost(&host, here));
        CHECK(cudaMallocHost(&all, there));
        // To pinned memory, with synchronizations of each kind.
        for (int round = 0; round < 4; round++) {
            std::memset(host, 0xee, here);
            fill<<<64, 256, 0, one>>>(device, there, ++seed);
            CHECK(copy(s, device, host, cudaMemcpyDeviceToHost, one));
            if (round == 0) CHECK(cudaStreamSynchronize(one));
            if (round == 1) CHECK(cudaDeviceSynchronize());
            if (round == 2) {
                CHECK(cudaEventRecord(event, one));
                while (cudaEventQuery(event) == cudaErrorNotReady) std::this_thread::yield();
            }
            if (round == 3) {
                Look look = {&s, host, seed};
                CHECK(cudaLaunchHostFunc(one, look_at, &look));
                CHECK(cudaStreamSynchronize(one));
            }
            expect_box(__LINE__, s, host, seed, 0xee);
        }
        // Behind a host function that waits for this thread.
        std::atomic<int> go(0);
        std::memset(host, 0xee, here);
        fill<<<64, 256, 0, one>>>(device, there, ++seed);
        CHECK(cudaLaunchHostFunc(one, wait_for, &go));
        CHECK(copy(s, device, host, cudaMemcpyDeviceToHost, one));
        CHECK(cudaEventRecord(event, one));
        CHECK(cudaStreamWaitEvent(two, event, 0));
        go = 1;
        CHECK(cudaStreamSynchronize(two));
        expect_box(__LINE__, s, host, seed, 0xee);
        // The same memory again and again, of which the last copy stays.
        for (int round = 0; round < 5; round++) {
            fill<<<64, 256, 0, one>>>(device, there, ++seed);
            CHECK(copy(s, device, host, cudaMemcpyDeviceToHost, one));
        }
        CHECK(cudaStreamSynchronize(one));
        expect_box(__LINE__, s, host, seed, 0xee);
        // Adjacent bytes after a box, a box after adjacent bytes.
        const size_t last = s.host_at(s.width - 1, s.height - 1, s.depth - 1);
        if (last < there) {
            CHECK(copy(s, device, host, cudaMemcpyDeviceToHost, one));
            CHECK(cudaMemcpyAsync(host, device, last + 1, cudaMemcpyDeviceToHost, one));
            CHECK(cudaStreamSynchronize(one));
            for (size_t i = 0; i <= last; i++) EXPECT(host[i] == pattern(i, seed));
            std::memset(host, 0xee, here);
            CHECK(cudaMemcpyAsync(host + last, device + last, 1, cudaMemcpyDeviceToHost, one));
            CHECK(copy(s, device, host, cudaMemcpyDeviceToHost, one));
            CHECK(cudaStreamSynchronize(one));
            expect_box(__LINE__, s, host, seed, 0xee);
        }
        // To the device.
        seed++;
        for (size_t i = 0; i < here; i++) host[i] = pattern(i, seed);
        CHECK(cudaMemsetAsync(device, 0x55, there, one));
        CHECK(copy(s, device, host, cudaMemcpyHostToDevice, one));
        CHECK(cudaMemcpyAsync(all, device, there, cudaMemcpyDeviceToHost, one));
        CHECK(cudaStreamSynchronize(one));
        expect_box(__LINE__, s, all, seed, 0x55, true);
        CHECK(cudaFree(device));
        CHECK(cudaFreeHost(host));
        CHECK(cudaFreeHost(all));
        std::printf("boxes: %zu x %zu x %zu right\n", s.width, s.height, s.depth);
    }

    // A host function behind one that waits for this thread writes the source, in memory of more
    // than 16 MiB.
    {
        const Shape s = {5000, 3000, 1, 5120, 6000, 3000, 3000, 0, 0, 0};
        unsigned char *there, *here, *all;
        CHECK(cudaMalloc(&there, s.device_bytes()));
        CHECK(cudaMallocHost(&here, s.host_bytes()));
        CHECK(cudaMallocHost(&all, s.device_bytes()));
        std::memset(here, 0, s.host_bytes());
        CHECK(cudaMemsetAsync(there, 0x55, s.device_bytes(), one));
        std::atomic<int> go(0);
        Work work = {here, s.host_bytes(), ++seed};
        CHECK(cudaLaunchHostFunc(one, wait_for, &go));
        CHECK(cudaLaunchHostFunc(one, write, &work));
        CHECK(copy(s, there, here, cudaMemcpyHostToDevice, one));
        CHECK(cudaMemcpyAsync(all, there, s.device_bytes(), cudaMemcpyDeviceToHost, one));
        go = 1;
        CHECK(cudaStreamSynchronize(one));
        expect_box(__LINE__, s, all, seed, 0x55, true);
        std::printf("boxes: behind a host function right\n");
    }

    // Arrays with elements of 1 to 16 bytes, in two and three dimensions, whole and in part.
    const cudaChannelFormatDesc formats[] = {
        cudaCreateChannelDesc<unsigned char>(), cudaCreateChannelDesc<short2>(), cudaCreateChannelDesc<float>(),
        cudaCreateChannelDesc<float4>()};
    for (const cudaChannelFormatDesc &format : formats)
        for (const size_t depth : {0, 7}) {
            const size_t element = (format.x + format.y + format.z + format.w) / 8, w = 1001, h = depth ? 130 : 700;
            const size_t layers = depth ? depth : 1, pitch = w * element + 24, bytes = pitch * h * layers;
            cudaArray_t array;
            const cudaError_t made = cudaMalloc3DArray(&array, &format, make_cudaExtent(w, h, depth));
            // The simulated driver has no such arrays.
            if (made == cudaErrorNotSupported) continue;
            CHECK(made);
            unsigned char *here, *back;
            CHECK(cudaMallocHost(&here, bytes));
            CHECK(cudaMallocHost(&back, bytes));
            seed++;
            for (size_t i = 0; i < bytes; i++) here[i] = pattern(i, seed);
            for (const size_t margin : {0, 3}) {
                std::memset(back, 0xee, bytes);
                cudaMemcpy3DParms p = {};
                p.srcPtr = make_cudaPitchedPtr(here, pitch, w, h);
                p.dstArray = array;
                p.extent = make_cudaExtent(w, h, layers);
                p.kind = cudaMemcpyHostToDevice;
                CHECK(cudaMemcpy3DAsync(&p, one));
                p = {};
                p.srcArray = array;
                p.srcPos = make_cudaPos(margin, margin, margin && depth);
                p.dstPtr = make_cudaPitchedPtr(back, pitch, w, h);
                p.extent = make_cudaExtent(w - margin, h - margin, layers - (margin && depth));
                p.kind = cudaMemcpyDeviceToHost;
                CHECK(cudaMemcpy3DAsync(&p, one));
                CHECK(cudaStreamSynchronize(one));
                for (size_t i = 0; i < bytes; i++) {
                    const size_t x = i % pitch, y = i / pitch % h, z = i / pitch / h;
                    const bool inside = x < p.extent.width * element && y < p.extent.height && z < p.extent.depth;
                    const size_t from = ((z + p.srcPos.z) * h + y + margin) * pitch + x + margin * element;
                    EXPECT(back[i] == (inside ? here[from] : 0xee));
                }
            }
            CHECK(cudaFreeArray(array));
            CHECK(cudaFreeHost(here));
            CHECK(cudaFreeHost(back));
        }
    std::printf("boxes: arrays right\n");

    // Two streams fill the columns of one image, in turn.
    const size_t width = 4096, height = 700, stripe = 512;
    unsigned char *image, *device;
    CHECK(cudaMallocHost(&image, width * height));
    CHECK(cudaMalloc(&device, width * height));
    fill<<<64, 256>>>(device, width * height, ++seed);
    CHECK(cudaDeviceSynchronize());
    for (size_t x = 0; x < width; x += stripe)
        CHECK(cudaMemcpy2DAsync(image + x, width, device + x, width, stripe, height, cudaMemcpyDeviceToHost,
                                x / stripe % 2 ? one : two));
    CHECK(cudaStreamSynchronize(one));
    CHECK(cudaStreamSynchronize(two));
    for (size_t i = 0; i < width * height; i++) EXPECT(image[i] == pattern(i, seed));
    std::printf("boxes: columns right\n");

    rows_within(device);

    // Wrong calls.
    SHOW(cudaMemcpy2DAsync(image, 10, device, width, 11, 2, cudaMemcpyDeviceToHost, one));
    SHOW(cudaMemcpy2DAsync(image, width, device, 10, 11, 2, cudaMemcpyDeviceToHost, one));
    SHOW(cudaMemcpy2DAsync(image, width, device, width, 0, 2, cudaMemcpyDeviceToHost, one));
    SHOW(cudaMemcpy2DAsync(image, width, nullptr, width, 8, 2, cudaMemcpyDeviceToHost, one));
    CHECK(cudaDeviceSynchronize());
    return 0;
}

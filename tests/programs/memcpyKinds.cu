// Copies of every kind: pageable and pinned, synchronous and asynchronous, in one and two
// dimensions, small, large and unaligned.
#include "driver.h"
#include "pattern.h"

#include <cstring>
#include <vector>

// Inverts every byte on the device, so that a copy that bypasses the device is noticed.
__global__ void invert(unsigned char *bytes, size_t count) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        bytes[i] = (unsigned char)~bytes[i];
}

static void sizes() {
    const size_t counts[] = {1, 2, 3, 7, 8, 64, 4095, 4096, 4097, 65535, 65537, (1 << 20) + 13};
    const size_t room = (1 << 20) + 64;
    unsigned char *device, *pinned;
    CHECK(cudaMalloc(&device, room));
    CHECK(cudaHostAlloc(&pinned, room, cudaHostAllocDefault));
    std::vector<unsigned char> from(room), to(room);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    unsigned seed = 1;
    for (size_t count : counts)
        for (size_t offset : {size_t(0), size_t(1), size_t(37)}) {
            seed++;
            fill(from.data() + offset, count, seed);
            CHECK(cudaMemset(device, 0xEE, room));
            CHECK(cudaMemcpy(device + offset, from.data() + offset, count, cudaMemcpyHostToDevice));
            std::memset(to.data(), 0, room);
            CHECK(cudaMemcpy(to.data() + 5, device + offset, count, cudaMemcpyDeviceToHost));
            EXPECT(holds(to.data() + 5, count, seed));
            EXPECT(to[4] == 0 && to[5 + count] == 0);
            std::memset(pinned, 0, room);
            CHECK(cudaMemcpyAsync(pinned + offset, device + offset, count, cudaMemcpyDefault, stream));
            CHECK(cudaStreamSynchronize(stream));
            EXPECT(holds(pinned + offset, count, seed));
            EXPECT(pinned[offset + count] == 0);
            unsigned char guard = 0;
            CHECK(cudaMemcpy(&guard, device + offset + count, 1, cudaMemcpyDefault));
            EXPECT(guard == 0xEE);
        }
    CHECK(cudaMemcpy(device, from.data(), 0, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpyAsync(pinned, device, 0, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(pinned));
    std::printf("memcpyKinds: small and unaligned copies right\n");
}

static void large(bool use_pinned) {
    const size_t count = 64 << 20;
    unsigned char *first, *second, *host = nullptr;
    std::vector<unsigned char> pageable;
    if (use_pinned) {
        CHECK(cudaHostAlloc(&host, count, cudaHostAllocPortable));
    } else {
        pageable.resize(count);
        host = pageable.data();
    }
    CHECK(cudaMalloc(&first, count));
    CHECK(cudaMalloc(&second, count));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    fill(host, count, 99);
    if (use_pinned) {
        CHECK(cudaMemcpyAsync(first, host, count, cudaMemcpyHostToDevice, stream));
        CHECK(cudaMemcpyAsync(second, first, count, cudaMemcpyDeviceToDevice, stream));
        CHECK(cudaStreamSynchronize(stream));
        std::memset(host, 0, count);  // allowed only after the synchronisation
        CHECK(cudaMemcpyAsync(host, second, count, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
    } else {
        CHECK(cudaMemcpy(first, host, count, cudaMemcpyHostToDevice));
        std::memset(host, 0, count);
        CHECK(cudaMemcpy(second, first, count, cudaMemcpyDeviceToDevice));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(host, second, count, cudaMemcpyDeviceToHost));
    }
    EXPECT(holds(host, count, 99));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(first));
    CHECK(cudaFree(second));
    if (use_pinned) CHECK(cudaFreeHost(host));
    std::printf("memcpyKinds: 64 MiB through %s memory right\n", use_pinned ? "pinned" : "pageable");
}

// After an asynchronous copy from pageable memory, the program may change that memory as soon as
// the call returns.
static void pageable_async() {
    const size_t count = 30000;  // under 64 KiB it is staged by any driver
    unsigned char *device;
    CHECK(cudaMalloc(&device, 8 * count));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::vector<unsigned char> host(count), back(8 * count);
    for (unsigned i = 0; i < 8; i++) {
        fill(host.data(), count, i);
        CHECK(cudaMemcpyAsync(device + i * count, host.data(), count, cudaMemcpyHostToDevice, stream));
    }
    invert<<<32, 128, 0, stream>>>(device, 8 * count);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpyAsync(back.data(), device, 8 * count, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (unsigned char &byte : back) byte = (unsigned char)~byte;
    for (unsigned i = 0; i < 8; i++) EXPECT(holds(back.data() + i * count, count, i));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    std::printf("memcpyKinds: pageable asynchronous copies right\n");
}

// Many copies into pinned memory in flight at once; each is read only after its event.
static void pinned_in_flight() {
    const int copies = 64;
    const size_t count = 20000;
    unsigned char *device, *pinned;
    CHECK(cudaMalloc(&device, copies * count));
    CHECK(cudaHostAlloc(&pinned, copies * count, cudaHostAllocDefault));
    std::vector<unsigned char> host(copies * count);
    for (int i = 0; i < copies; i++) fill(host.data() + i * count, count, 1000 + i);
    CHECK(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());  // a copy from pageable memory may still be under way, and the stream below does not wait for it
    std::memset(pinned, 0, copies * count);
    cudaStream_t stream;
    cudaEvent_t events[copies];
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int i = 0; i < copies; i++) {
        CHECK(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming));
        CHECK(cudaMemcpyAsync(pinned + i * count, device + i * count, count, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaEventRecord(events[i], stream));
    }
    for (int i = 0; i < copies; i++) {
        if (i % 2) {
            CHECK(cudaEventSynchronize(events[i]));
        } else {
            while (cudaEventQuery(events[i]) == cudaErrorNotReady) {
            }
            cudaGetLastError();
        }
        EXPECT(holds(pinned + i * count, count, 1000 + i));
        CHECK(cudaEventDestroy(events[i]));
    }
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(pinned));
    std::printf("memcpyKinds: pinned copies in flight right\n");
}

// More than travels in one message.
static void large_box() {
    const size_t width = 1 << 20, height = 300, host_pitch = width + 64;
    std::vector<unsigned char> from(host_pitch * height), to(host_pitch * height);
    fill(from.data(), from.size(), 5);
    unsigned char *device;
    CHECK(cudaMalloc(&device, width * height));
    CHECK(cudaMemcpy2D(device, width, from.data(), host_pitch, width, height, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy2D(to.data(), host_pitch, device, width, width, height, cudaMemcpyDeviceToHost));
    for (size_t row = 0; row < height; row++) {
        EXPECT(std::memcmp(&to[row * host_pitch], &from[row * host_pitch], width) == 0);
        EXPECT(to[row * host_pitch + width] == 0);
    }
    CHECK(cudaFree(device));
    std::printf("memcpyKinds: a box of 300 MiB right\n");
}

static void two_dimensional() {
    const size_t width = 301, height = 77, host_pitch = 320;
    std::vector<unsigned char> from(host_pitch * height, 0xAB), to(host_pitch * height, 0xCD);
    for (size_t row = 0; row < height; row++) fill(&from[row * host_pitch], width, unsigned(row));
    unsigned char *device, *packed;
    size_t pitch = 0;
    CHECK(cudaMallocPitch(&device, &pitch, width, height));
    EXPECT(pitch >= width);
    CHECK(cudaMalloc(&packed, width * height));
    CHECK(cudaMemset2D(device, pitch, 0x11, width, height));
    CHECK(cudaMemcpy2D(device, pitch, from.data(), host_pitch, width, height, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy2D(packed, width, device, pitch, width, height, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpy2DAsync(to.data(), host_pitch, packed, width, width, height, cudaMemcpyDeviceToHost, nullptr));
    CHECK(cudaDeviceSynchronize());
    for (size_t row = 0; row < height; row++) {
        EXPECT(holds(&to[row * host_pitch], width, unsigned(row)));
        EXPECT(to[row * host_pitch + width] == 0xCD);
    }
    // A column of single bytes.
    std::vector<unsigned char> column(height);
    CHECK(cudaMemcpy2D(column.data(), 1, device + 3, pitch, 1, height, cudaMemcpyDeviceToHost));
    for (size_t row = 0; row < height; row++) EXPECT(column[row] == pattern(3, unsigned(row)));
    CHECK(cudaFree(device));
    CHECK(cudaFree(packed));
    std::printf("memcpyKinds: two-dimensional copies right\n");
}

static void others() {
    const size_t count = 100000;
    std::vector<unsigned char> from(count), to(count);
    fill(from.data(), count, 3);
    unsigned char *first, *second;
    CHECK(cudaMalloc(&first, count));
    CHECK(cudaMalloc(&second, count));
    CHECK(cudaMemcpy(to.data(), from.data(), count, cudaMemcpyHostToHost));
    EXPECT(holds(to.data(), count, 3));
    CHECK(cudaMemcpy(first, from.data(), count, cudaMemcpyDefault));
    CHECK(cudaMemcpyPeer(second, 0, first, 0, count));  // to itself
    CHECK(cudaDeviceSynchronize());
    std::memset(to.data(), 0, count);
    CHECK(cudaMemcpy(to.data(), second, count, cudaMemcpyDefault));
    EXPECT(holds(to.data(), count, 3));

    // Memory that was pinned after it was allocated.
    CHECK(cudaHostRegister(to.data(), count, cudaHostRegisterDefault));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    invert<<<16, 128, 0, stream>>>(first, count);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpyAsync(to.data(), first, count, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaHostUnregister(to.data()));
    for (unsigned char &byte : to) byte = (unsigned char)~byte;
    EXPECT(holds(to.data(), count, 3));

    // Fills of 8, 16 and 32 bits.
    CHECK(cudaMemset(first, 0x5A, count));
    CHECK(cudaMemset(first + 1000, 0xFF, 3));
    CHECK(cudaMemcpy(to.data(), first, count, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count; i++) EXPECT(to[i] == (i >= 1000 && i < 1003 ? 0xFF : 0x5A));

    cudaPointerAttributes attributes;
    unsigned char *pinned;
    CHECK(cudaHostAlloc(&pinned, 4096, cudaHostAllocDefault));
    CHECK(cudaPointerGetAttributes(&attributes, first + 10));
    EXPECT(attributes.type == cudaMemoryTypeDevice && attributes.device == 0);
    EXPECT(attributes.devicePointer == first + 10);
    CHECK(cudaPointerGetAttributes(&attributes, pinned + 10));
    EXPECT(attributes.type == cudaMemoryTypeHost && attributes.hostPointer == pinned + 10);
    CHECK(cudaPointerGetAttributes(&attributes, from.data()));
    EXPECT(attributes.type == cudaMemoryTypeUnregistered);
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(first));
    CHECK(cudaFree(second));
    std::printf("memcpyKinds: default, peer, registered memory, fills and pointer attributes right\n");
}

__global__ void put(unsigned *words, int count, unsigned value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) words[i] = value + i;
}

// Synchronous copies and fills that name pinned and registered memory by its device address: they
// are complete at their return.
static void host_memory_by_device_address() {
    DRIVER(cuMemcpyDtoD);
    DRIVER(cuMemcpyPeer);
    DRIVER(cuMemcpy2D);
    DRIVER(cuMemsetD32);
    DRIVER(cuCtxGetCurrent);
    const int count = 30000, bytes = count * 4;
    CUcontext context;
    CHECK_DRIVER(cuCtxGetCurrent_(&context));
    unsigned *device, *pinned, *registered, *address;
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaMallocHost(&pinned, bytes));
    registered = static_cast<unsigned *>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
    CHECK(cudaHostRegister(registered, bytes, cudaHostRegisterMapped));
    for (unsigned *host : {pinned, registered}) {
        CHECK(cudaHostGetDevicePointer(&address, host, 0));
        CUdeviceptr there = reinterpret_cast<CUdeviceptr>(address), here = reinterpret_cast<CUdeviceptr>(device);
        CUDA_MEMCPY2D box = {};
        box.srcMemoryType = box.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        box.srcDevice = here;
        box.dstDevice = there;
        box.srcPitch = box.dstPitch = 4000;
        box.WidthInBytes = 4000;
        box.Height = bytes / 4000;
        for (int way = 0; way < 4; way++) {
            std::memset(host, 0, bytes);
            put<<<(count + 255) / 256, 256>>>(device, count, 100 * way);
            if (way == 0) CHECK_DRIVER(cuMemcpyDtoD_(there, here, bytes));
            if (way == 1) CHECK_DRIVER(cuMemcpyPeer_(there, context, here, context, bytes));
            if (way == 2) CHECK_DRIVER(cuMemcpy2D_(&box));
            if (way == 3) CHECK_DRIVER(cuMemsetD32_(there, 300, count));
            for (int i : {0, count / 2, count - 1}) EXPECT(host[i] == 100u * way + (way < 3 ? i : 0));
        }
        // The program may change the source after the copy.
        host[0] = 5;
        CHECK_DRIVER(cuMemcpyDtoD_(here, there, 4));
        host[0] = 6;
        unsigned found;
        CHECK(cudaMemcpy(&found, device, sizeof found, cudaMemcpyDeviceToHost));
        EXPECT(found == 5);
    }
    CHECK(cudaHostUnregister(registered));
    std::free(registered);
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFree(device));
    std::printf("memcpyKinds: host memory by its device address right\n");
}

// Copies and fills that wait because the program requests so for their memory.
static void synchronous_on_request() {
    DRIVER(cuPointerSetAttribute);
    DRIVER(cuPointerGetAttribute);
    DRIVER(cuMemAlloc);
    DRIVER(cuMemcpyDtoD);
    DRIVER(cuMemsetD32);
    DRIVER(cuMemFree);
    DRIVER(cuStreamQuery);
    const int count = 1 << 17;
    CUdeviceptr memory, other;
    CHECK_DRIVER(cuMemAlloc_(&memory, count * 4));
    CHECK_DRIVER(cuMemAlloc_(&other, count * 4));
    for (unsigned value : {0u, 1u}) {
        unsigned found = 7;
        CHECK_DRIVER(cuPointerSetAttribute_(&value, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory + 1000));
        CHECK_DRIVER(cuPointerGetAttribute_(&found, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory));
        EXPECT(found == value);
        CHECK_DRIVER(cuPointerGetAttribute_(&found, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, other));
        EXPECT(found == 0);
    }
    for (int way = 0; way < 3; way++) {
        for (int i = 0; i < 8; i++)
            put<<<count / 256, 256>>>(reinterpret_cast<unsigned *>(other), count, 1);
        if (way == 0) CHECK_DRIVER(cuMemcpyDtoD_(memory, other, count * 4));
        if (way == 1) CHECK_DRIVER(cuMemcpyDtoD_(other, memory, count * 4));
        if (way == 2) CHECK_DRIVER(cuMemsetD32_(memory, 1, count));
        CHECK_DRIVER(cuStreamQuery_(nullptr));
    }
    CHECK_DRIVER(cuMemFree_(memory));
    CHECK_DRIVER(cuMemFree_(other));
    std::printf("memcpyKinds: synchronous copies on request right\n");
}

int main() {
    sizes();
    pageable_async();
    pinned_in_flight();
    two_dimensional();
    large_box();
    others();
    host_memory_by_device_address();
    synchronous_on_request();
    large(false);
    large(true);
    return 0;
}

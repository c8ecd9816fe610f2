// Advice about managed memory, prefetches of it, and the attributes that show both.
#include "driver.h"

#include <cstring>

typedef CUresult (*Advise)(CUdeviceptr, size_t, CUmem_advise, CUdevice);
typedef CUresult (*AdviseAt)(CUdeviceptr, size_t, CUmem_advise, CUmemLocation);
typedef CUresult (*Prefetch)(CUdeviceptr, size_t, CUdevice, CUstream);
typedef CUresult (*PrefetchTo)(CUdeviceptr, size_t, CUmemLocation, unsigned, CUstream);
typedef CUresult (*Attribute)(void *, size_t, CUmem_range_attribute, CUdeviceptr, size_t);

static const size_t SIZE = 4 << 20, HALF = SIZE / 2;
static Advise advise;
static AdviseAt advise_at;
static Prefetch prefetch;
static PrefetchTo prefetch_to;
static Attribute attribute;
static CUdeviceptr memory;

// Prints what each attribute says about a part of the memory.
static void show(const char *name, size_t offset = 0, size_t len = SIZE) {
    std::printf("%s:", name);
    for (int which = 1; which <= 8; which++) {
        int values[3] = {99, 99, 99};
        size_t size = which == CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY ? sizeof values : sizeof values[0];
        CUresult status = attribute(values, size, CUmem_range_attribute(which), memory + offset, len);
        if (status) {
            std::printf(" %d=error %d", which, status);
        } else if (which == CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY) {
            std::printf(" %d=%d,%d,%d", which, values[0], values[1], values[2]);
        } else {
            std::printf(" %d=%d", which, values[0]);
        }
    }
    std::printf("\n");
}

static CUmemLocation at(CUmemLocationType type, int id) {
    CUmemLocation location = {};
    location.type = type;
    location.id = id;
    return location;
}

static void advice() {
    show("fresh");
    SHOW_DRIVER(advise(memory, HALF, CU_MEM_ADVISE_SET_READ_MOSTLY, 0));
    show("half read mostly, all");
    show("half read mostly, first half", 0, HALF);
    show("half read mostly, second half", HALF, HALF);
    show("half read mostly, inside", 4096, 100);
    SHOW_DRIVER(advise(memory + HALF, HALF, CU_MEM_ADVISE_SET_READ_MOSTLY, 77));
    show("both halves");
    SHOW_DRIVER(advise(memory + 10, 10, CU_MEM_ADVISE_UNSET_READ_MOSTLY, 0));
    show("without ten bytes, first page", 0, 4096);
    show("without ten bytes, second page", 4096, 4096);
    show("without ten bytes, behind 64 KiB", 1 << 16, 4096);
    show("without ten bytes, behind 2 MiB", 2 << 20, 4096);
    SHOW_DRIVER(advise(memory, SIZE, CU_MEM_ADVISE_UNSET_READ_MOSTLY, 0));
    SHOW_DRIVER(advise(memory, SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, 0));
    show("preferred on device");
    SHOW_DRIVER(advise(memory, HALF, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_DEVICE_CPU));
    show("preferred on both, all");
    show("preferred on host", 0, HALF);
    SHOW_DRIVER(advise(memory, SIZE, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, 0));
    show("preferred nowhere");
    SHOW_DRIVER(advise(memory, SIZE, CU_MEM_ADVISE_SET_ACCESSED_BY, 0));
    show("accessed by device");
    SHOW_DRIVER(advise(memory, HALF, CU_MEM_ADVISE_SET_ACCESSED_BY, CU_DEVICE_CPU));
    show("accessed by both, half", 0, HALF);
    show("accessed by both, all");
    SHOW_DRIVER(advise(memory, HALF, CU_MEM_ADVISE_UNSET_ACCESSED_BY, 0));
    show("accessed by the host", 0, HALF);
    SHOW_DRIVER(advise(memory, SIZE, CU_MEM_ADVISE_UNSET_ACCESSED_BY, 0));
    SHOW_DRIVER(advise(memory, SIZE, CU_MEM_ADVISE_UNSET_ACCESSED_BY, CU_DEVICE_CPU));
    show("accessed by none");
}

static void locations() {
    SHOW_DRIVER(advise_at(memory, SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, at(CU_MEM_LOCATION_TYPE_HOST, 0)));
    show("preferred on host");
    SHOW_DRIVER(advise_at(memory, SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, at(CU_MEM_LOCATION_TYPE_HOST_NUMA, 0)));
    show("preferred on node 0");
    SHOW_DRIVER(advise_at(memory, SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, at(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, 0)));
    SHOW_DRIVER(advise_at(memory, SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, at(CU_MEM_LOCATION_TYPE_DEVICE, 0)));
    show("preferred on device");
    SHOW_DRIVER(advise_at(memory, SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, at(CU_MEM_LOCATION_TYPE_INVALID, 0)));
    SHOW_DRIVER(advise_at(memory, SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, at(CUmemLocationType(77), 0)));
    SHOW_DRIVER(advise_at(memory, SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, at(CU_MEM_LOCATION_TYPE_HOST_NUMA, 7777)));
    SHOW_DRIVER(advise_at(memory, SIZE, CU_MEM_ADVISE_SET_ACCESSED_BY, at(CU_MEM_LOCATION_TYPE_HOST, 0)));
    SHOW_DRIVER(advise_at(memory, SIZE, CU_MEM_ADVISE_SET_ACCESSED_BY, at(CU_MEM_LOCATION_TYPE_HOST_NUMA, 0)));
    show("accessed by host");
    SHOW_DRIVER(advise_at(memory, SIZE, CU_MEM_ADVISE_UNSET_ACCESSED_BY, at(CU_MEM_LOCATION_TYPE_HOST, 0)));
    SHOW_DRIVER(advise_at(memory, SIZE, CU_MEM_ADVISE_SET_READ_MOSTLY, at(CU_MEM_LOCATION_TYPE_INVALID, 0)));
    SHOW_DRIVER(advise_at(memory, SIZE, CU_MEM_ADVISE_UNSET_READ_MOSTLY, at(CUmemLocationType(77), 0)));
    SHOW_DRIVER(advise_at(memory, SIZE, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, at(CUmemLocationType(77), 0)));
    show("preferred nowhere");
}

static void prefetches(CUstream stream) {
    SHOW_DRIVER(prefetch(memory, SIZE, 0, stream));
    CHECK(cudaStreamSynchronize(stream));
    show("on device");
    SHOW_DRIVER(prefetch(memory, HALF, CU_DEVICE_CPU, nullptr));
    CHECK(cudaDeviceSynchronize());
    show("half on host, all");
    show("half on host, half", 0, HALF);
    SHOW_DRIVER(prefetch_to(memory, SIZE, at(CU_MEM_LOCATION_TYPE_HOST, 0), 0, stream));
    show("on host");
    SHOW_DRIVER(prefetch_to(memory, SIZE, at(CU_MEM_LOCATION_TYPE_HOST_NUMA, 0), 0, stream));
    show("on node 0");
    SHOW_DRIVER(prefetch_to(memory, SIZE, at(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, 0), 0, stream));
    show("on this node");
    SHOW_DRIVER(prefetch_to(memory, SIZE, at(CU_MEM_LOCATION_TYPE_DEVICE, 0), 0, stream));
    show("on device again");
    SHOW_DRIVER(prefetch_to(memory, SIZE, at(CU_MEM_LOCATION_TYPE_DEVICE, 0), 1, stream));
    SHOW_DRIVER(prefetch_to(memory, SIZE, at(CU_MEM_LOCATION_TYPE_DEVICE, 77), 0, stream));
    SHOW_DRIVER(prefetch_to(memory, SIZE, at(CU_MEM_LOCATION_TYPE_HOST_NUMA, 7777), 0, stream));
    SHOW_DRIVER(prefetch_to(memory, SIZE, at(CU_MEM_LOCATION_TYPE_INVALID, 0), 0, stream));
    SHOW_DRIVER(prefetch_to(memory, SIZE, at(CUmemLocationType(77), 0), 0, stream));
    SHOW_DRIVER(prefetch(memory + 100, 100, 0, stream));
    show("ten bytes on device, second page", 4096, 4096);
    CHECK(cudaStreamSynchronize(stream));
}

static void refused(CUstream stream) {
    SHOW_DRIVER(prefetch(memory, SIZE, 77, stream));
    SHOW_DRIVER(prefetch(memory, SIZE, -2, stream));
    SHOW_DRIVER(prefetch(memory, 0, 0, stream));
    SHOW_DRIVER(prefetch(memory, SIZE + 1, 0, stream));
    SHOW_DRIVER(prefetch(0, SIZE, 0, stream));
    SHOW_DRIVER(advise(memory, SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, 77));
    SHOW_DRIVER(advise(memory, SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, -2));
    SHOW_DRIVER(advise(memory, SIZE, CU_MEM_ADVISE_SET_ACCESSED_BY, 77));
    SHOW_DRIVER(advise(memory, SIZE, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, 77));
    SHOW_DRIVER(advise(memory, SIZE, CUmem_advise(0), 0));
    SHOW_DRIVER(advise(memory, SIZE, CUmem_advise(7), 0));
    SHOW_DRIVER(advise(memory, 0, CU_MEM_ADVISE_SET_READ_MOSTLY, 0));
    SHOW_DRIVER(advise(memory, SIZE + 1, CU_MEM_ADVISE_SET_READ_MOSTLY, 0));
    int values[4];
    SHOW_DRIVER(attribute(values, 0, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, memory, SIZE));
    SHOW_DRIVER(attribute(values, 8, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, memory, SIZE));
    SHOW_DRIVER(attribute(nullptr, 4, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, memory, SIZE));
    SHOW_DRIVER(attribute(values, 6, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, memory, SIZE));
    SHOW_DRIVER(attribute(values, 0, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, memory, SIZE));
    SHOW_DRIVER(attribute(values, 4, CUmem_range_attribute(9), memory, SIZE));
    SHOW_DRIVER(attribute(values, 4, CUmem_range_attribute(0), memory, SIZE));
    SHOW_DRIVER(attribute(values, 4, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, memory, 0));
    SHOW_DRIVER(attribute(values, 4, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, memory, SIZE + 1));
    // During a capture.
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    SHOW_DRIVER(prefetch(memory, SIZE, 0, stream));
    cudaGraph_t graph = nullptr;
    SHOW(cudaStreamEndCapture(stream, &graph));
    cudaGetLastError();
    if (graph) CHECK(cudaGraphDestroy(graph));
}

#if CUDART_VERSION >= 13000
static void batches(CUstream stream) {
    DRIVER(cuMemPrefetchBatchAsync);
    DRIVER(cuMemDiscardBatchAsync);
    DRIVER(cuMemDiscardAndPrefetchBatchAsync);
    CUdeviceptr parts[2] = {memory, memory + HALF}, ordinary[1] = {0};
    size_t sizes[2] = {HALF, HALF}, one[1] = {0}, two[2] = {0, 1}, wrong[2] = {0, 2}, second[1] = {1}, none[2] = {HALF, 0};
    CUmemLocation places[2] = {at(CU_MEM_LOCATION_TYPE_DEVICE, 0), at(CU_MEM_LOCATION_TYPE_HOST, 0)};
    CUmemLocation unknown[1] = {at(CU_MEM_LOCATION_TYPE_DEVICE, 77)};
    SHOW_DRIVER(cuMemPrefetchBatchAsync_(parts, sizes, 2, places, one, 1, 0, stream));
    show("batch on device");
    SHOW_DRIVER(cuMemPrefetchBatchAsync_(parts, sizes, 2, places, two, 2, 0, stream));
    show("batch on device", 0, HALF);
    show("batch on host", HALF, HALF);
    SHOW_DRIVER(cuMemPrefetchBatchAsync_(parts, sizes, 2, places, wrong, 2, 0, stream));
    SHOW_DRIVER(cuMemPrefetchBatchAsync_(parts, sizes, 2, places, second, 1, 0, stream));
    SHOW_DRIVER(cuMemPrefetchBatchAsync_(parts, sizes, 2, places, one, 1, 1, stream));
    SHOW_DRIVER(cuMemPrefetchBatchAsync_(parts, sizes, 0, places, one, 1, 0, stream));
    SHOW_DRIVER(cuMemPrefetchBatchAsync_(parts, sizes, 2, places, one, 0, 0, stream));
    SHOW_DRIVER(cuMemPrefetchBatchAsync_(parts, sizes, 1, places, two, 2, 0, stream));
    SHOW_DRIVER(cuMemPrefetchBatchAsync_(parts, none, 2, places, one, 1, 0, stream));
    SHOW_DRIVER(cuMemPrefetchBatchAsync_(ordinary, sizes, 1, places, one, 1, 0, stream));
    SHOW_DRIVER(cuMemPrefetchBatchAsync_(parts, sizes, 2, unknown, one, 1, 0, stream));
    SHOW_DRIVER(cuMemPrefetchBatchAsync_(nullptr, sizes, 2, places, one, 1, 0, stream));
    SHOW_DRIVER(cuMemPrefetchBatchAsync_(parts, sizes, 2, places, one, 1, 0, nullptr));
    SHOW_DRIVER(cuMemDiscardBatchAsync_(parts, sizes, 1, 0, nullptr));
    SHOW_DRIVER(cuMemDiscardBatchAsync_(parts, sizes, 1, 1, stream));
    SHOW_DRIVER(cuMemDiscardBatchAsync_(parts, sizes, 0, 0, stream));
    SHOW_DRIVER(cuMemDiscardBatchAsync_(ordinary, sizes, 1, 0, stream));
    // The second half keeps its contents.
    SHOW_DRIVER(cuMemDiscardBatchAsync_(parts, sizes, 1, 0, stream));
    SHOW_DRIVER(cuMemDiscardAndPrefetchBatchAsync_(parts, sizes, 1, places, one, 1, 0, stream));
    show("discarded", 0, HALF);
    CHECK(cudaStreamSynchronize(stream));
    auto *bytes = reinterpret_cast<unsigned char *>(memory);
    size_t right = 0;
    for (size_t i = HALF; i < SIZE; i++) right += bytes[i] == 5;
    std::printf("the second half has %zu of %zu bytes\n", right, HALF);
}
#endif

// Writes on both sides between prefetches.
static __global__ void add(unsigned char *bytes, unsigned char value) {
    size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < SIZE) bytes[i] += value;
}

static void contents(CUstream stream) {
    auto *bytes = reinterpret_cast<unsigned char *>(memory);
    std::memset(bytes, 1, SIZE);
    size_t right = 0;
    for (int round = 1; round <= 20; round++) {
        CHECK_DRIVER(prefetch(memory, SIZE, 0, stream));
        add<<<SIZE / 256, 256, 0, stream>>>(bytes, 1);
        CHECK_DRIVER(prefetch(memory, SIZE, CU_DEVICE_CPU, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (size_t i = 0; i < SIZE; i++) right += bytes[i] == (unsigned char)(1 + 2 * round - 1);
        for (size_t i = 0; i < SIZE; i++) bytes[i]++;
    }
    std::printf("contents: %zu of %zu right\n", right, 20 * SIZE);
}

// Other kinds of memory.
static void unmanaged(CUstream stream) {
    void *device, *pinned;
    CHECK(cudaMalloc(&device, SIZE));
    CHECK(cudaMallocHost(&pinned, SIZE));
    for (void *other : {device, pinned, std::malloc(SIZE)}) {
        CUdeviceptr address = reinterpret_cast<CUdeviceptr>(other);
        int value = 0;
        SHOW_DRIVER(advise(address, SIZE, CU_MEM_ADVISE_SET_READ_MOSTLY, 0));
        SHOW_DRIVER(prefetch(address, SIZE, 0, stream));
        SHOW_DRIVER(attribute(&value, 4, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, address, SIZE));
    }
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(pinned));
}

int main() {
    advise = reinterpret_cast<Advise>(driver_symbol("cuMemAdvise"));
    advise_at = reinterpret_cast<AdviseAt>(driver_symbol("cuMemAdvise_v2"));
    prefetch = reinterpret_cast<Prefetch>(driver_symbol("cuMemPrefetchAsync"));
    prefetch_to = reinterpret_cast<PrefetchTo>(driver_symbol("cuMemPrefetchAsync_v2"));
    attribute = reinterpret_cast<Attribute>(driver_symbol("cuMemRangeGetAttribute"));
    CHECK(cudaFree(nullptr));
    CHECK(cudaMallocManaged(reinterpret_cast<void **>(&memory), SIZE));
    std::memset(reinterpret_cast<void *>(memory), 5, SIZE);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    advice();
    locations();
    prefetches(stream);
    refused(stream);
#if CUDART_VERSION >= 13000
    batches(stream);
#endif
    contents(stream);
    unmanaged(stream);
    CHECK(cudaFree(reinterpret_cast<void *>(memory)));
    CHECK(cudaMallocManaged(reinterpret_cast<void **>(&memory), SIZE));
    show("fresh again");
    CHECK(cudaFree(reinterpret_cast<void *>(memory)));
    return 0;
}

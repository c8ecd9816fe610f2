// Copies in batches, boxes between devices, one-dimensional copies of arrays, pools by location.
#include "driver.h"

#include <cstring>
#include <numeric>
#include <vector>

const size_t COUNT = 100000;
const size_t BYTES = COUNT * sizeof(int);

static std::vector<int> from_device(const void *device, size_t count) {
    std::vector<int> values(count);
    CHECK(cudaMemcpy(values.data(), device, count * sizeof(int), cudaMemcpyDeviceToHost));
    return values;
}

#if CUDA_VERSION >= 13000

// Ends the program unless number I is I times the factor, or `other` if that is permitted.
static void expect_multiples(const std::vector<int> &values, int factor, const int *other = nullptr) {
    for (size_t i = 0; i < values.size(); i++) {
        if (values[i] == int(i) * factor || (other && values[i] == *other)) continue;
        std::printf("number %zu is %d, not %d\n", i, values[i], int(i) * factor);
        EXPECT(false);
    }
}

static void batches(cudaStream_t stream, int *one, int *other) {
    typedef CUresult (*Batch)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t, CUstream);
    static auto batch = reinterpret_cast<Batch>(driver_symbol("cuMemcpyBatchAsync_v2"));
    int *pinned, *result;
    CHECK(cudaMallocHost(&pinned, BYTES));
    CHECK(cudaMallocHost(&result, BYTES));
    std::vector<int> pageable(COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        pinned[i] = int(i) * 3;
        pageable[i] = int(i) * 5;
    }
    auto at = [](void *p) { return reinterpret_cast<CUdeviceptr>(p); };
    CUdeviceptr targets[] = {at(one), at(other)}, sources[] = {at(pinned), at(pageable.data())};
    size_t lengths[] = {BYTES, BYTES}, starts[] = {0, 1};
    CUmemcpyAttributes attributes[2] = {};
    attributes[0].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    attributes[1].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    CHECK_DRIVER(batch(targets, sources, lengths, 2, attributes, starts, 2, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect_multiples(from_device(one, COUNT), 3);
    expect_multiples(from_device(other, COUNT), 5);
    // The driver should read the second source during the call. An H100 with driver 580 most likely
    // reads pageable memory later, and may find what the program writes then.
    int later = -1;
    CHECK(cudaMemset(other, 0, BYTES));
    CHECK(cudaDeviceSynchronize());
    CHECK_DRIVER(batch(targets, sources, lengths, 2, attributes, starts, 2, stream));
    std::memset(pageable.data(), 0xff, BYTES);
    CHECK(cudaStreamSynchronize(stream));
    expect_multiples(from_device(other, COUNT), 5, &later);
    for (size_t i = 0; i < COUNT; i++) pageable[i] = int(i) * 5;
    CHECK(cudaMemcpy(other, pageable.data(), BYTES, cudaMemcpyHostToDevice));
    std::memset(pageable.data(), 0xff, BYTES);
    CHECK(cudaDeviceSynchronize());
    // Back to the host, and from device to device.
    int *third;
    CHECK(cudaMalloc(&third, BYTES));
    CUdeviceptr targets2[] = {at(result), at(pageable.data()), at(third)}, sources2[] = {at(one), at(other), at(other)};
    size_t lengths2[] = {BYTES, 4000, BYTES}, start = 0;
    CHECK_DRIVER(batch(targets2, sources2, lengths2, 3, attributes, &start, 1, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect_multiples(from_device(third, COUNT), 5);
    expect_multiples(std::vector<int>(result, result + COUNT), 3);
    expect_multiples(std::vector<int>(pageable.begin(), pageable.begin() + 1000), 5);
    // Rules of the manual: more groups than copies, the legacy default stream, a first group that
    // does not start with the first copy, no order of access.
    size_t rising[] = {0, 1, 2, 3};
    CUmemcpyAttributes four[4] = {attributes[0], attributes[0], attributes[0], attributes[0]};
    EXPECT(batch(targets2, sources2, lengths2, 3, four, rising, 4, stream) != CUDA_SUCCESS);
    EXPECT(batch(targets2, sources2, lengths2, 3, attributes, &start, 1, nullptr) != CUDA_SUCCESS);
    start = 1;
    EXPECT(batch(targets2, sources2, lengths2, 3, attributes, &start, 1, stream) != CUDA_SUCCESS);
    start = 0;
    attributes[0].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_INVALID;
    EXPECT(batch(targets2, sources2, lengths2, 3, attributes, &start, 1, stream) != CUDA_SUCCESS);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaFree(third));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFreeHost(result));
}

// The first forms, of CUDA 12.8, report the number of a copy that fails.
static void first_forms(cudaStream_t stream, int *one, int *other) {
    typedef CUresult (*Batch)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t,
                              size_t *, CUstream);
    typedef CUresult (*Boxes)(size_t, CUDA_MEMCPY3D_BATCH_OP *, size_t *, unsigned long long, CUstream);
    static auto batch = reinterpret_cast<Batch>(driver_symbol("cuMemcpyBatchAsync"));
    static auto boxes = reinterpret_cast<Boxes>(driver_symbol("cuMemcpy3DBatchAsync"));
    int *pinned;
    CHECK(cudaMallocHost(&pinned, BYTES));
    for (size_t i = 0; i < COUNT; i++) pinned[i] = int(i) * 7;
    CUdeviceptr targets[] = {reinterpret_cast<CUdeviceptr>(one), reinterpret_cast<CUdeviceptr>(other)};
    CUdeviceptr sources[] = {reinterpret_cast<CUdeviceptr>(pinned), reinterpret_cast<CUdeviceptr>(one)};
    size_t lengths[] = {BYTES, BYTES / 2}, start = 0, failed = 99;
    CUmemcpyAttributes attributes = {};
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    CHECK_DRIVER(batch(targets, sources, lengths, 1, &attributes, &start, 1, &failed, stream));
    CHECK_DRIVER(batch(targets + 1, sources + 1, lengths + 1, 1, &attributes, &start, 1, &failed, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect_multiples(from_device(one, COUNT), 7);
    expect_multiples(from_device(other, COUNT / 2), 7);
    std::printf("copyBatch: failed copy after success: %zd\n", ssize_t(failed));
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_INVALID;
    CUresult result = batch(targets, sources, lengths, 2, &attributes, &start, 1, &failed, stream);
    std::printf("copyBatch: no order -> %d, copy %zd\n", int(result), ssize_t(failed));
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    sources[1] = 16;
    failed = 99;
    result = batch(targets, sources, lengths, 2, &attributes, &start, 1, &failed, nullptr);
    std::printf("copyBatch: default stream -> %d, copy %zd\n", int(result), ssize_t(failed));
    CUDA_MEMCPY3D_BATCH_OP copies[2] = {};
    for (auto &copy : copies) {
        copy.src.type = copy.dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
        copy.src.op.ptr.ptr = reinterpret_cast<CUdeviceptr>(one);
        copy.dst.op.ptr.ptr = reinterpret_cast<CUdeviceptr>(other);
        copy.extent.width = 4000;
        copy.extent.height = copy.extent.depth = 1;
        copy.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    }
    failed = 99;
    CHECK(cudaMemset(other, 0, BYTES));
    CHECK(cudaDeviceSynchronize());
    CHECK_DRIVER(boxes(1, copies, &failed, 0, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect_multiples(from_device(other, 1000), 7);
    std::printf("copyBatch: failed box after success: %zd\n", ssize_t(failed));
    copies[1].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_INVALID;
    result = boxes(2, copies, &failed, 0, stream);
    std::printf("copyBatch: box without order -> %d, copy %zd\n", int(result), ssize_t(failed));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaFreeHost(pinned));
}

static void boxes(cudaStream_t stream, int *one, int *other) {
    typedef CUresult (*Boxes)(size_t, CUDA_MEMCPY3D_BATCH_OP *, unsigned long long, CUstream);
    static auto batch = reinterpret_cast<Boxes>(driver_symbol("cuMemcpy3DBatchAsync_v2"));
    std::vector<int> host(COUNT);
    std::iota(host.begin(), host.end(), 0);
    CHECK(cudaMemcpy(one, host.data(), BYTES, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(other, 0, BYTES));
    CHECK(cudaDeviceSynchronize());
    // 3 layers of 5 rows of 20 numbers, out of rows of 100 in layers of 10 rows, to a packed box.
    CUDA_MEMCPY3D_BATCH_OP copy = {};
    copy.src.type = copy.dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
    copy.src.op.ptr.ptr = reinterpret_cast<CUdeviceptr>(one);
    copy.src.op.ptr.rowLength = 100 * sizeof(int);
    copy.src.op.ptr.layerHeight = 10;
    copy.dst.op.ptr.ptr = reinterpret_cast<CUdeviceptr>(other);
    copy.extent.width = 20 * sizeof(int);
    copy.extent.height = 5;
    copy.extent.depth = 3;
    copy.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    CUDA_MEMCPY3D_BATCH_OP copies[] = {copy, copy};
    std::vector<int> back(300);
    copies[1].dst.op.ptr.ptr = reinterpret_cast<CUdeviceptr>(back.data());
    CHECK_DRIVER(batch(2, copies, 0, stream));
    CHECK(cudaStreamSynchronize(stream));
    auto values = from_device(other, 301);
    for (int z = 0; z < 3; z++)
        for (int y = 0; y < 5; y++)
            for (int x = 0; x < 20; x++) {
                EXPECT(values[(z * 5 + y) * 20 + x] == (z * 10 + y) * 100 + x);
                EXPECT(back[(z * 5 + y) * 20 + x] == (z * 10 + y) * 100 + x);
            }
    EXPECT(values[300] == 0);
    copies[0].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_INVALID;
    EXPECT(batch(1, copies, 0, stream) != CUDA_SUCCESS);
}

static void pools() {
    DRIVER(cuMemGetDefaultMemPool);
    DRIVER(cuMemGetMemPool);
    DRIVER(cuMemSetMemPool);
    DRIVER(cuDeviceGetDefaultMemPool);
    DRIVER(cuMemPoolGetAccess);
    DRIVER(cuMemPoolSetAccess);
    CUmemLocation location = {};
    location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemoryPool of_device, of_location, now;
    CHECK_DRIVER(cuDeviceGetDefaultMemPool_(&of_device, 0));
    CHECK_DRIVER(cuMemGetDefaultMemPool_(&of_location, &location, CU_MEM_ALLOCATION_TYPE_PINNED));
    EXPECT(of_location == of_device);
    CHECK_DRIVER(cuMemGetMemPool_(&now, &location, CU_MEM_ALLOCATION_TYPE_PINNED));
    EXPECT(now == of_device);
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    cudaMemPool_t own;
    CHECK(cudaMemPoolCreate(&own, &properties));
    CHECK_DRIVER(cuMemSetMemPool_(&location, CU_MEM_ALLOCATION_TYPE_PINNED, own));
    CHECK_DRIVER(cuMemGetMemPool_(&now, &location, CU_MEM_ALLOCATION_TYPE_PINNED));
    EXPECT(now == own);
    CUmemAccess_flags flags[2] = {CU_MEM_ACCESS_FLAGS_PROT_NONE, CU_MEM_ACCESS_FLAGS_PROT_NONE};
    CHECK_DRIVER(cuMemPoolGetAccess_(flags, own, &location));
    EXPECT(flags[0] == CU_MEM_ACCESS_FLAGS_PROT_READWRITE && flags[1] == CU_MEM_ACCESS_FLAGS_PROT_NONE);
    CUmemAccessDesc access = {};
    access.location = location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CHECK_DRIVER(cuMemPoolSetAccess_(own, &access, 1));
    CHECK_DRIVER(cuMemSetMemPool_(&location, CU_MEM_ALLOCATION_TYPE_PINNED, of_device));
    CHECK(cudaMemPoolDestroy(own));
}

#endif

static void between_devices(cudaStream_t stream, int *one, int *other) {
    DRIVER(cuMemcpy3DPeer);
    DRIVER(cuMemcpy3DPeerAsync);
    DRIVER(cuCtxGetCurrent);
    std::vector<int> host(COUNT);
    std::iota(host.begin(), host.end(), 7);
    CHECK(cudaMemcpy(one, host.data(), BYTES, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(other, 0, BYTES));
    CHECK(cudaDeviceSynchronize());
    CUDA_MEMCPY3D_PEER copy = {};
    CHECK_DRIVER(cuCtxGetCurrent_(&copy.srcContext));
    copy.dstContext = copy.srcContext;
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = reinterpret_cast<CUdeviceptr>(one);
    copy.dstDevice = reinterpret_cast<CUdeviceptr>(other);
    copy.srcPitch = 400;
    copy.srcHeight = 10;
    copy.dstPitch = 100;
    copy.dstHeight = 5;
    copy.WidthInBytes = 100;
    copy.Height = 5;
    copy.Depth = 2;
    for (int asynchronous = 0; asynchronous < 2; asynchronous++) {
        CHECK(cudaMemset(other, 0, BYTES));
        CHECK(cudaDeviceSynchronize());
        if (asynchronous)
            CHECK_DRIVER(cuMemcpy3DPeerAsync_(&copy, stream));
        else
            CHECK_DRIVER(cuMemcpy3DPeer_(&copy));
        CHECK(cudaDeviceSynchronize());
        auto values = from_device(other, 251);
        for (int z = 0; z < 2; z++)
            for (int y = 0; y < 5; y++)
                for (int x = 0; x < 25; x++) EXPECT(values[(z * 5 + y) * 25 + x] == (z * 10 + y) * 100 + x + 7);
        EXPECT(values[250] == 0);
    }
    std::printf("copyBatch: boxes between devices right\n");
}

static void arrays(cudaStream_t stream, int *one) {
    DRIVER(cuArrayCreate);
    DRIVER(cuArrayDestroy);
    DRIVER(cuMemcpyHtoA);
    DRIVER(cuMemcpyAtoH);
    DRIVER(cuMemcpyAtoA);
    DRIVER(cuMemcpyAtoD);
    DRIVER(cuMemcpyDtoA);
    DRIVER(cuMemcpyHtoAAsync);
    DRIVER(cuMemcpyAtoHAsync);
    const size_t N = 1000, bytes = N * sizeof(int);
    CUDA_ARRAY_DESCRIPTOR description = {};
    description.Width = N;
    description.Format = CU_AD_FORMAT_SIGNED_INT32;
    description.NumChannels = 1;
    CUarray a, b;
    CHECK_DRIVER(cuArrayCreate_(&a, &description));
    CHECK_DRIVER(cuArrayCreate_(&b, &description));
    std::vector<int> host(N), back(N);
    std::iota(host.begin(), host.end(), 100);
    CHECK_DRIVER(cuMemcpyHtoA_(a, 0, host.data(), bytes));
    CHECK_DRIVER(cuMemcpyAtoA_(b, 0, a, 400, bytes - 400));
    CHECK_DRIVER(cuMemcpyAtoH_(back.data(), b, 0, bytes - 400));
    for (size_t i = 0; i < N - 100; i++) EXPECT(back[i] == int(i) + 200);
    CHECK_DRIVER(cuMemcpyAtoD_(reinterpret_cast<CUdeviceptr>(one), a, 40, 400));
    auto values = from_device(one, 100);
    for (int i = 0; i < 100; i++) EXPECT(values[i] == i + 110);
    CHECK_DRIVER(cuMemcpyDtoA_(b, 800, reinterpret_cast<CUdeviceptr>(one), 400));
    // A copy on the device may still run when its call returns, and the stream does not wait.
    CHECK(cudaDeviceSynchronize());
    CHECK_DRIVER(cuMemcpyAtoHAsync_(back.data(), b, 800, 400, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < 100; i++) EXPECT(back[i] == i + 110);
    std::iota(host.begin(), host.end(), 5000);
    CHECK_DRIVER(cuMemcpyHtoAAsync_(a, 0, host.data(), bytes, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK_DRIVER(cuMemcpyAtoH_(back.data(), a, 0, bytes));
    EXPECT(host == back);
    CHECK_DRIVER(cuArrayDestroy_(a));
    CHECK_DRIVER(cuArrayDestroy_(b));
    std::printf("copyBatch: arrays right\n");
}

int main() {
    int *one, *other;
    cudaStream_t stream;
    CHECK(cudaMalloc(&one, BYTES));
    CHECK(cudaMalloc(&other, BYTES));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
#if CUDA_VERSION >= 13000
    batches(stream, one, other);
    first_forms(stream, one, other);
    boxes(stream, one, other);
    pools();
    std::printf("copyBatch: batches right\n");
#endif
    between_devices(stream, one, other);
    arrays(stream, one);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(one));
    CHECK(cudaFree(other));
    return 0;
}

// Contexts, numbers and devices of streams, attributes and their copies, waits for and writes of
// 64-bit values by the forms of both releases, one by one and in batches.
#include "driver.h"

#include <cstring>

static void names() {
    typedef CUresult (*GetContext)(CUstream, CUcontext *);
    typedef CUresult (*GetBoth)(CUstream, CUcontext *, CUgreenCtx *);
    typedef CUresult (*GetDevice)(CUstream, CUdevice *);
    DRIVER(cuStreamGetId);
    DRIVER(cuCtxGetCurrent);
    auto context_of = reinterpret_cast<GetContext>(driver_symbol("cuStreamGetCtx"));
    cudaStream_t streams[2];
    CUcontext current, found = nullptr;
    CHECK_DRIVER(cuCtxGetCurrent_(&current));
    unsigned long long ids[3];
    for (int i = 0; i < 2; i++) {
        CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
        CHECK_DRIVER(cuStreamGetId_(streams[i], &ids[i]));
    }
    CHECK_DRIVER(cuStreamGetId_(nullptr, &ids[2]));
    EXPECT(ids[0] != ids[1] && ids[0] != ids[2] && ids[1] != ids[2]);
    for (CUstream stream : {streams[0], cudaStream_t(nullptr), cudaStreamLegacy, cudaStreamPerThread}) {
        CHECK_DRIVER(context_of(stream, &found));
        EXPECT(found == current);
    }
    SHOW_DRIVER(context_of(streams[0], nullptr));
    // Calls of drivers since CUDA 12.5 and 12.8.
    if (auto both = reinterpret_cast<GetBoth>(driver_symbol_if("cuStreamGetCtx_v2"))) {
        CUgreenCtx green = reinterpret_cast<CUgreenCtx>(1);
        CHECK_DRIVER(both(streams[0], &found, &green));
        EXPECT(found == current && green == nullptr);
    }
    if (auto device_of = reinterpret_cast<GetDevice>(driver_symbol_if("cuStreamGetDevice"))) {
        CUdevice device = 99;
        CHECK_DRIVER(device_of(streams[0], &device));
        EXPECT(device == 0);
    }
    for (cudaStream_t stream : streams) CHECK(cudaStreamDestroy(stream));
    std::printf("streamCalls: names right\n");
}

static void attributes() {
    DRIVER(cuStreamGetAttribute);
    DRIVER(cuStreamSetAttribute);
    DRIVER(cuStreamCopyAttributes);
    cudaStream_t streams[2];
    for (cudaStream_t &stream : streams) CHECK(cudaStreamCreate(&stream));
    CUstreamAttrValue value = {}, found = {};
    value.syncPolicy = CU_SYNC_POLICY_YIELD;
    CHECK_DRIVER(cuStreamSetAttribute_(streams[0], CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &value));
    CHECK_DRIVER(cuStreamGetAttribute_(streams[0], CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &found));
    std::memset(&value, 0, sizeof value);
    CHECK_DRIVER(cuStreamGetAttribute_(streams[0], CU_LAUNCH_ATTRIBUTE_PRIORITY, &found));
    std::printf("priority %d\n", found.priority);
    value.priority = -2;
    CHECK_DRIVER(cuStreamSetAttribute_(streams[0], CU_LAUNCH_ATTRIBUTE_PRIORITY, &value));
    CHECK_DRIVER(cuStreamCopyAttributes_(streams[1], streams[0]));
    for (cudaStream_t stream : streams) {
        CHECK_DRIVER(cuStreamGetAttribute_(stream, CU_LAUNCH_ATTRIBUTE_PRIORITY, &found));
        std::printf("set and copied: priority %d\n", found.priority);
    }
    SHOW_DRIVER(cuStreamGetAttribute_(streams[0], CUstreamAttrID(99), &found));
    for (cudaStream_t stream : streams) CHECK(cudaStreamDestroy(stream));
}

typedef CUresult (*Value64)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
typedef CUresult (*Batch)(CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned);

// One stream waits for a value that another one writes. The first release's forms work only where
// the administrator permits it, so that their result is not compared.
static void values(const char *suffix) {
    char name[64];
    auto find = [&](const char *stem) {
        std::snprintf(name, sizeof name, "%s%s", stem, suffix);
        return driver_symbol(name);
    };
    auto wait = reinterpret_cast<Value64>(find("cuStreamWaitValue64"));
    auto write = reinterpret_cast<Value64>(find("cuStreamWriteValue64"));
    auto batch = reinterpret_cast<Batch>(find("cuStreamBatchMemOp"));
    DRIVER(cuMemAlloc);
    DRIVER(cuMemFree);
    CUdeviceptr memory;
    CHECK_DRIVER(cuMemAlloc_(&memory, 4096));
    CHECK(cudaMemset(reinterpret_cast<void *>(memory), 0, 4096));
    CHECK(cudaDeviceSynchronize());
    cudaStream_t first, second;
    CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    const cuuint64_t BIG = 0x123456789abcdefull;
    CUresult possible = write(second, memory, BIG, CU_STREAM_WRITE_VALUE_DEFAULT);
    if (possible == CUDA_SUCCESS) {
        CHECK_DRIVER(wait(first, memory, BIG, CU_STREAM_WAIT_VALUE_EQ));
        CHECK_DRIVER(write(first, memory + 8, BIG + 1, CU_STREAM_WRITE_VALUE_DEFAULT));
        CUstreamBatchMemOpParams operations[3] = {};
        operations[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
        operations[0].waitValue.address = memory + 8;
        operations[0].waitValue.value64 = BIG;
        operations[0].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
        operations[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
        operations[1].writeValue.address = memory + 16;
        operations[1].writeValue.value64 = BIG + 2;
        operations[2].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        operations[2].writeValue.address = memory + 24;
        operations[2].writeValue.value = 77;
        CHECK_DRIVER(batch(second, 3, operations, 0));
        CHECK(cudaStreamSynchronize(second));
        CHECK(cudaStreamSynchronize(first));
        cuuint64_t back[4];
        CHECK(cudaMemcpy(back, reinterpret_cast<void *>(memory), sizeof back, cudaMemcpyDeviceToHost));
        EXPECT(back[0] == BIG && back[1] == BIG + 1 && back[2] == BIG + 2 && back[3] == 77);
        EXPECT(wait(first, memory, 1, 99) != CUDA_SUCCESS);
    } else {
        EXPECT(possible == CUDA_ERROR_NOT_SUPPORTED && suffix[0] == 0);
    }
    CHECK(cudaStreamDestroy(first));
    CHECK(cudaStreamDestroy(second));
    CHECK_DRIVER(cuMemFree_(memory));
    std::printf("streamCalls: values%s right\n", suffix);
}

int main() {
    CHECK(cudaFree(nullptr));
    names();
    attributes();
    values("_v2");
    values("");
    return 0;
}

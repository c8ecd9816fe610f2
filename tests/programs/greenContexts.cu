// Green contexts: a device's multiprocessors are divided, kernels run in streams of both parts,
// events of whole contexts order their work.
#include "driver.h"

#include <cstring>
#include <vector>

const int COUNT = 1 << 14;

__global__ void add(int *values, int count, int amount) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) values[i] += amount;
}

__global__ void multiply(int *values, int count, int factor) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) values[i] *= factor;
}

#if CUDA_VERSION >= 12050

// CU_DEV_SM_RESOURCE_GROUP_PARAMS of CUDA 13.1
struct Demand {
    unsigned count, coscheduled, preferred, flags, reserved[12];
};

// Calls that older drivers do not have.
static void calls_of_13_1(CUdevResource all, CUstream stream, unsigned of_stream) {
    typedef CUresult (*OfStream)(CUstream, CUdevResource *, CUdevResourceType);
    typedef CUresult (*Split)(CUdevResource *, unsigned, const CUdevResource *, CUdevResource *, unsigned, Demand *);
    auto get = reinterpret_cast<OfStream>(driver_symbol_if("cuStreamGetDevResource"));
    auto split = reinterpret_cast<Split>(driver_symbol_if("cuDevSmResourceSplit"));
    CUdevResource own = {}, groups[2] = {}, rest = {};
    CUresult told = get ? get(stream, &own, CU_DEV_RESOURCE_TYPE_SM) : CUDA_ERROR_NOT_SUPPORTED;
    if (told == CUDA_ERROR_NOT_SUPPORTED || !split) return;
    CHECK_DRIVER(told);
    EXPECT(own.sm.smCount == of_stream);
    // Eight multiprocessors, and as many as the rest has.
    Demand demands[2] = {};
    demands[0].count = 8;
    demands[0].coscheduled = demands[1].coscheduled = 2;
    CHECK_DRIVER(split(nullptr, 2, &all, nullptr, 0, demands));
    EXPECT(demands[0].count == 8 && demands[1].count >= 2 && demands[1].count % 2 == 0);
    CHECK_DRIVER(split(groups, 2, &all, &rest, 0, demands));
    EXPECT(groups[0].sm.smCount == 8 && groups[1].sm.smCount == demands[1].count);
    EXPECT(8 + demands[1].count + rest.sm.smCount == all.sm.smCount);
    demands[0].count = 1 << 20;
    EXPECT(split(groups, 1, &all, &rest, 0, demands) != CUDA_SUCCESS);
}

int main() {
    CHECK(cudaFree(nullptr));
    DRIVER(cuDeviceGetDevResource);
    DRIVER(cuCtxGetDevResource);
    DRIVER(cuGreenCtxGetDevResource);
    DRIVER(cuDevSmResourceSplitByCount);
    DRIVER(cuDevResourceGenerateDesc);
    DRIVER(cuGreenCtxCreate);
    DRIVER(cuGreenCtxDestroy);
    DRIVER(cuGreenCtxStreamCreate);
    DRIVER(cuCtxFromGreenCtx);
    DRIVER(cuStreamGetGreenCtx);
    DRIVER(cuGreenCtxRecordEvent);
    DRIVER(cuGreenCtxWaitEvent);
    DRIVER(cuCtxRecordEvent);
    DRIVER(cuCtxWaitEvent);
    DRIVER(cuCtxGetCurrent);
    DRIVER(cuCtxSetCurrent);
    CUdevResource all = {}, whole = {}, parts[2] = {}, rest = {};
    CUcontext primary;
    CHECK_DRIVER(cuCtxGetCurrent_(&primary));
    CHECK_DRIVER(cuDeviceGetDevResource_(0, &all, CU_DEV_RESOURCE_TYPE_SM));
    CHECK_DRIVER(cuCtxGetDevResource_(primary, &whole, CU_DEV_RESOURCE_TYPE_SM));
    EXPECT(all.sm.smCount >= 16 && whole.sm.smCount == all.sm.smCount);
    unsigned possible = 0, groups = 2;
    CHECK_DRIVER(cuDevSmResourceSplitByCount_(nullptr, &possible, &all, nullptr, 0, 8));
    EXPECT(possible >= 2);
    CHECK_DRIVER(cuDevSmResourceSplitByCount_(parts, &groups, &all, &rest, 0, 8));
    EXPECT(groups == 2 && parts[0].sm.smCount >= 8 && parts[1].sm.smCount == parts[0].sm.smCount);
    EXPECT(parts[0].sm.smCount + parts[1].sm.smCount + rest.sm.smCount == all.sm.smCount);
    CUgreenCtx green[2];
    CUstream stream[2];
    for (int i = 0; i < 2; i++) {
        CUdevResourceDesc description;
        CUdevResource own = {};
        CUgreenCtx found = nullptr;
        CHECK_DRIVER(cuDevResourceGenerateDesc_(&description, &parts[i], 1));
        CHECK_DRIVER(cuGreenCtxCreate_(&green[i], description, 0, CU_GREEN_CTX_DEFAULT_STREAM));
        CHECK_DRIVER(cuGreenCtxGetDevResource_(green[i], &own, CU_DEV_RESOURCE_TYPE_SM));
        EXPECT(own.sm.smCount == parts[i].sm.smCount);
        CHECK_DRIVER(cuGreenCtxStreamCreate_(&stream[i], green[i], CU_STREAM_NON_BLOCKING, 0));
        CHECK_DRIVER(cuStreamGetGreenCtx_(stream[i], &found));
        EXPECT(found == green[i]);
    }
    std::printf("greenContexts: divided\n");
    calls_of_13_1(all, stream[0], parts[0].sm.smCount);

    int *values;
    CHECK(cudaMalloc(&values, COUNT * sizeof *values));
    CHECK(cudaMemset(values, 0, COUNT * sizeof *values));
    CHECK(cudaDeviceSynchronize());
    cudaEvent_t event, other;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&other, cudaEventDisableTiming));
    // 20 rounds of +1 in one part and *2 in the other, each behind the one before.
    unsigned expected = 0;
    for (int round = 0; round < 20; round++) {
        add<<<32, 256, 0, stream[0]>>>(values, COUNT, 1);
        CHECK_DRIVER(cuGreenCtxRecordEvent_(green[0], event));
        CHECK_DRIVER(cuGreenCtxWaitEvent_(green[1], event));
        multiply<<<32, 256, 0, stream[1]>>>(values, COUNT, 2);
        CHECK_DRIVER(cuGreenCtxRecordEvent_(green[1], other));
        CHECK_DRIVER(cuGreenCtxWaitEvent_(green[0], other));
        expected = (expected + 1) * 2;
    }
    CHECK(cudaEventSynchronize(other));
    std::vector<int> host(COUNT);
    CHECK(cudaMemcpy(host.data(), values, COUNT * sizeof *values, cudaMemcpyDeviceToHost));
    for (int value : host) EXPECT(value == int(expected));
    std::printf("greenContexts: events of green contexts order their work\n");

    // An event of the primary context, which includes both parts.
    cudaStream_t plain;
    CHECK(cudaStreamCreateWithFlags(&plain, cudaStreamNonBlocking));
    CHECK(cudaMemset(values, 0, COUNT * sizeof *values));
    CHECK(cudaDeviceSynchronize());
    for (int round = 0; round < 10; round++) {
        add<<<32, 256, 0, stream[round & 1]>>>(values, COUNT, 1);
        CHECK_DRIVER(cuCtxRecordEvent_(primary, event));
        CHECK_DRIVER(cuCtxWaitEvent_(primary, event));
        multiply<<<32, 256, 0, plain>>>(values, COUNT, 2);
        CHECK_DRIVER(cuCtxRecordEvent_(primary, event));
        CHECK_DRIVER(cuCtxWaitEvent_(primary, event));
    }
    CHECK(cudaEventSynchronize(event));
    CHECK(cudaMemcpy(host.data(), values, COUNT * sizeof *values, cudaMemcpyDeviceToHost));
    for (int value : host) EXPECT(value == 2046);
    std::printf("greenContexts: events of the primary context order all work\n");

    CUcontext context, now;
    CHECK_DRIVER(cuCtxFromGreenCtx_(&context, green[0]));
    CHECK_DRIVER(cuCtxSetCurrent_(context));
    CHECK_DRIVER(cuCtxGetCurrent_(&now));
    EXPECT(now == context);
    DRIVER(cuCtxGetId);
    DRIVER(cuGreenCtxGetId);
    unsigned long long of_context = 0, of_green[2] = {}, of_primary = 0;
    CHECK_DRIVER(cuCtxGetId_(context, &of_context));
    CHECK_DRIVER(cuCtxGetId_(primary, &of_primary));
    for (int i = 0; i < 2; i++) CHECK_DRIVER(cuGreenCtxGetId_(green[i], &of_green[i]));
    EXPECT(of_green[0] != of_green[1] && of_green[0] != of_primary);
    // The simulated driver's green contexts have no context of their own.
    if (of_context == of_green[0]) {
        CHECK_DRIVER(cuGreenCtxGetId_(nullptr, &of_context));
        EXPECT(of_context == of_green[0]);
        CHECK_DRIVER(cuCtxSetCurrent_(primary));
        EXPECT(cuGreenCtxGetId_(nullptr, &of_context) == CUDA_ERROR_INVALID_CONTEXT);
    }
    CHECK_DRIVER(cuCtxSetCurrent_(primary));
    CHECK(cudaStreamDestroy(plain));
    for (int i = 0; i < 2; i++) {
        CHECK(cudaStreamDestroy(stream[i]));
        CHECK_DRIVER(cuGreenCtxDestroy_(green[i]));
    }
    // Memory outlives the green contexts.
    CHECK(cudaMemcpy(host.data(), values, COUNT * sizeof *values, cudaMemcpyDeviceToHost));
    EXPECT(host[0] == 2046 && host[COUNT - 1] == 2046);
    CHECK(cudaFree(values));
    std::printf("greenContexts: right\n");
    return 0;
}

#else

int main() { return 0; }

#endif

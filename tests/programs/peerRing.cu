// Two processes, a device each where there are two: each imports the other's buffers and maps them
// for its own device. Their kernels pass words and flags to each other while both run, as in NCCL.
#include "processes.h"

#include <vector>

constexpr int RANKS = 2, CONNECTIONS = 8;
constexpr unsigned THREADS = 64, EAGER = 10, REPLAYS = 10;

// Start of a buffer, which the other process writes.
struct Buffer {
    // Round of the last words that came, and of the last ones that the other process has read.
    volatile unsigned arrived, read;
    unsigned padding[30];
    volatile unsigned words[THREADS];
};

__device__ unsigned word(int rank, unsigned round, unsigned connection, unsigned thread) {
    return round * 100003u + connection * 1009u + thread * 7u + unsigned(rank);
}

// Sends a round's words to the other process, and counts the wrong ones that come from it.
__global__ void exchange(char *mine, char *theirs, size_t size, int rank, const unsigned *round, unsigned *wrong) {
    Buffer *in = reinterpret_cast<Buffer *>(mine + blockIdx.x * size);
    Buffer *out = reinterpret_cast<Buffer *>(theirs + blockIdx.x * size);
    const unsigned now = *round;
    // The other process has read the words of before.
    while (in->read < now - 1) {}
    __syncthreads();
    out->words[threadIdx.x] = word(rank, now, blockIdx.x, threadIdx.x);
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) out->arrived = now;
    while (in->arrived < now) {}
    __threadfence_system();
    if (in->words[threadIdx.x] != word(1 - rank, now, blockIdx.x, threadIdx.x)) atomicAdd(wrong, 1u);
    __syncthreads();
    if (threadIdx.x == 0) out->read = now;
}

__global__ void next(unsigned *round) { ++*round; }

static int rank(int number, const Peer &peer) {
    int devices = 0, reach = 1;
    CHECK(cudaGetDeviceCount(&devices));
    if (devices > 1) CHECK(cudaDeviceCanAccessPeer(&reach, number, 1 - number));
    const int device = devices > 1 && reach ? number : 0;
    CHECK(cudaSetDevice(device));
    CHECK(cudaFree(nullptr));
    DRIVER(cuMemAddressFree);
    DRIVER(cuMemAddressReserve);
    DRIVER(cuMemCreate);
    DRIVER(cuMemExportToShareableHandle);
    DRIVER(cuMemGetAllocationGranularity);
    DRIVER(cuMemImportFromShareableHandle);
    DRIVER(cuMemMap);
    DRIVER(cuMemRelease);
    DRIVER(cuMemSetAccess);
    DRIVER(cuMemUnmap);
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    size_t size = 0;
    CHECK_DRIVER(cuMemGetAllocationGranularity_(&size, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    EXPECT(size >= sizeof(Buffer));
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    // The first half is this process's, the other half the other's.
    CUdeviceptr all;
    CHECK_DRIVER(cuMemAddressReserve_(&all, 2 * CONNECTIONS * size, 0, 0, 0));
    for (int i = 0; i < CONNECTIONS; i++) {
        CUmemGenericAllocationHandle own, other;
        int descriptor = -1;
        CHECK_DRIVER(cuMemCreate_(&own, size, &properties, 0));
        CHECK_DRIVER(cuMemMap_(all + i * size, size, 0, own, 0));
        CHECK_DRIVER(cuMemSetAccess_(all + i * size, size, &access, 1));
        CHECK(cudaMemset(reinterpret_cast<void *>(all + i * size), 0, size));
        CHECK(cudaDeviceSynchronize());
        CHECK_DRIVER(cuMemExportToShareableHandle_(&descriptor, own, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        peer.send_descriptor(descriptor);
        close(descriptor);
        descriptor = peer.receive_descriptor();
        CHECK_DRIVER(cuMemImportFromShareableHandle_(&other, reinterpret_cast<void *>(uintptr_t(descriptor)),
                                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        close(descriptor);
        const CUdeviceptr there = all + (CONNECTIONS + i) * size;
        CHECK_DRIVER(cuMemMap_(there, size, 0, other, 0));
        CHECK_DRIVER(cuMemSetAccess_(there, size, &access, 1));
        CHECK_DRIVER(cuMemRelease_(own));
        CHECK_DRIVER(cuMemRelease_(other));
    }
    unsigned *round, *wrong, found = 0;
    CHECK(cudaMalloc(&round, sizeof *round));
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    CHECK(cudaMemset(wrong, 0, sizeof *wrong));
    CHECK(cudaMemset(round, 0, sizeof *round));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaDeviceSynchronize());
    char *mine = reinterpret_cast<char *>(all), *theirs = mine + CONNECTIONS * size;
    auto send = [&] {
        next<<<1, 1, 0, stream>>>(round);
        exchange<<<CONNECTIONS, THREADS, 0, stream>>>(mine, theirs, size, number, round, wrong);
    };
    for (unsigned i = 0; i < EAGER; i++) send();
    CHECK(cudaStreamSynchronize(stream));
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    send();
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, nullptr, nullptr, 0));
    for (unsigned i = 0; i < REPLAYS; i++) CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
    EXPECT(found == 0);
    peer.tell();
    peer.hear();
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    CHECK_DRIVER(cuMemUnmap_(all, 2 * CONNECTIONS * size));
    CHECK_DRIVER(cuMemAddressFree_(all, 2 * CONNECTIONS * size));
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3) return rank(std::atoi(argv[1]), parent(argv));
    std::vector<Peer> ranks;
    for (int i = 0; i < RANKS; i++) ranks.push_back(start(std::to_string(i).c_str()));
    for (int i = 0; i < CONNECTIONS; i++) {
        const int first = ranks[0].receive_descriptor(), second = ranks[1].receive_descriptor();
        ranks[1].send_descriptor(first);
        ranks[0].send_descriptor(second);
        close(first);
        close(second);
    }
    for (const Peer &one : ranks) one.hear();
    for (const Peer &one : ranks) one.tell();
    for (const Peer &one : ranks) EXPECT(one.end() == 0);
    std::printf("peerRing: %u rounds of %d connections right\n", EAGER + REPLAYS, CONNECTIONS);
    return 0;
}

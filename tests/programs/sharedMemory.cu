// Memory of several processes: the first one allocates and exports, each child (fork and exec)
// imports everything, and their kernels read what the others wrote.
#include "processes.h"

#include <vector>

constexpr int CHILDREN = 2, ROUNDS = 50;
constexpr size_t WORDS = 4096;

__global__ void fill(unsigned *values, unsigned add) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    values[i] = i * 3u + add;
}

// Counts the words that are not what `fill` writes.
__global__ void differ(const unsigned *values, unsigned add, unsigned *count) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (values[i] != i * 3u + add) atomicAdd(count, 1u);
}

static CUmemAllocationProp properties() {
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return properties;
}

static size_t piece() {
    DRIVER(cuMemGetAllocationGranularity);
    CUmemAllocationProp wanted = properties();
    size_t granularity = 0;
    CHECK_DRIVER(cuMemGetAllocationGranularity_(&granularity, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    return (WORDS * sizeof(unsigned) + granularity - 1) / granularity * granularity;
}

// Imports a piece for each child, and maps them side by side.
static CUdeviceptr import_all(const Peer &peer) {
    DRIVER(cuMemAddressReserve);
    DRIVER(cuMemImportFromShareableHandle);
    DRIVER(cuMemMap);
    DRIVER(cuMemRelease);
    DRIVER(cuMemSetAccess);
    const size_t size = piece();
    CUdeviceptr range;
    CHECK_DRIVER(cuMemAddressReserve_(&range, CHILDREN * size, 0, 0, 0));
    for (int i = 0; i < CHILDREN; i++) {
        int descriptor = peer.receive_descriptor();
        CUmemGenericAllocationHandle memory;
        CHECK_DRIVER(cuMemImportFromShareableHandle_(&memory, reinterpret_cast<void *>(uintptr_t(descriptor)),
                                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        close(descriptor);
        CHECK_DRIVER(cuMemMap_(range + i * size, size, 0, memory, 0));
        CHECK_DRIVER(cuMemRelease_(memory));
    }
    CUmemAccessDesc access = {};
    access.location = properties().location, access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CHECK_DRIVER(cuMemSetAccess_(range, CHILDREN * size, &access, 1));
    return range;
}

// Waits until all children have come this far.
static void barrier(const Peer &peer) {
    peer.tell();
    peer.hear();
}

static int child(int number, const Peer &peer) {
    CHECK(cudaFree(nullptr));
    const size_t size = piece();
    CUdeviceptr range = import_all(peer);
    auto of = [&](int i) { return reinterpret_cast<unsigned *>(range + (i % CHILDREN) * size); };
    unsigned *count, wrong = 0;
    CHECK(cudaMalloc(&count, sizeof *count));
    CHECK(cudaMemset(count, 0, sizeof *count));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::vector<unsigned> host(WORDS);
    for (unsigned round = 0; round < ROUNDS; round++) {
        unsigned add = round * 100 + unsigned(number);
        if (round % 2) {
            fill<<<WORDS / 128, 128, 0, stream>>>(of(number), add);
            CHECK(cudaGetLastError());
            CHECK(cudaStreamSynchronize(stream));
        } else {
            for (size_t i = 0; i < WORDS; i++) host[i] = unsigned(i) * 3u + add;
            CHECK(cudaMemcpy(of(number), host.data(), WORDS * sizeof(unsigned), cudaMemcpyHostToDevice));
            CHECK(cudaStreamSynchronize(nullptr));  // bytes of pageable memory may still be on their way
        }
        barrier(peer);
        unsigned other = round * 100 + unsigned((number + 1) % CHILDREN);
        differ<<<WORDS / 128, 128, 0, stream>>>(of(number + 1), other, count);
        CHECK(cudaGetLastError());
        CHECK(cudaStreamSynchronize(stream));
        barrier(peer);
    }
    CHECK(cudaMemcpy(&wrong, count, sizeof wrong, cudaMemcpyDeviceToHost));
    EXPECT(wrong == 0);
    DRIVER(cuMemUnmap);
    DRIVER(cuMemAddressFree);
    CHECK_DRIVER(cuMemUnmap_(range, CHILDREN * size));
    CHECK_DRIVER(cuMemAddressFree_(range, CHILDREN * size));
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3) return child(std::atoi(argv[1]), parent(argv));
    CHECK(cudaFree(nullptr));
    DRIVER(cuMemCreate);
    DRIVER(cuMemExportToShareableHandle);
    DRIVER(cuMemRelease);
    CUmemAllocationProp wanted = properties(), plain = wanted;
    plain.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    CUmemGenericAllocationHandle memory[CHILDREN], other;
    int descriptors[CHILDREN], none = -1;
    CHECK_DRIVER(cuMemCreate_(&other, piece(), &plain, 0));
    EXPECT(cuMemExportToShareableHandle_(&none, other, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS);
    CHECK_DRIVER(cuMemRelease_(other));
    for (int i = 0; i < CHILDREN; i++) {
        CHECK_DRIVER(cuMemCreate_(&memory[i], piece(), &wanted, 0));
        CHECK_DRIVER(
            cuMemExportToShareableHandle_(&descriptors[i], memory[i], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    }
    std::vector<Peer> peers;
    for (int i = 0; i < CHILDREN; i++) {
        peers.push_back(start(std::to_string(i).c_str()));
        for (int descriptor : descriptors) peers[i].send_descriptor(descriptor);
    }
    for (int descriptor : descriptors) close(descriptor);
    std::printf("sharedMemory: %d children have %d pieces\n", CHILDREN, CHILDREN);
    for (int step = 0; step < 2 * ROUNDS; step++) {
        for (const Peer &peer : peers) peer.hear();
        for (const Peer &peer : peers) peer.tell();
    }
    for (const Peer &peer : peers) EXPECT(peer.end() == 0);
    for (CUmemGenericAllocationHandle one : memory) CHECK_DRIVER(cuMemRelease_(one));
    std::printf("sharedMemory: %d rounds right\n", ROUNDS);
    return 0;
}

// Tensors that pass between processes as in torch.multiprocessing: parts of blocks, each with
// a handle of its block, an event, and a reference counter in a file.
//
// The calls and their order are those of PyTorch (StorageSharing.cpp, CudaIPCTypes.cpp).
#include "processes.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <map>
#include <vector>

constexpr int TENSORS = 200, ALIVE = 8;
constexpr size_t BLOCK = 20 << 20, WORDS = 2000;

__global__ void fill(unsigned *values, unsigned seed) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < WORDS) values[i] = i * 5u + seed;
}

// Counts what `fill` did not write, and changes everything.
__global__ void use(unsigned *values, unsigned seed, unsigned *wrong) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= WORDS) return;
    if (values[i] != i * 5u + seed) atomicAdd(wrong, 1u);
    values[i] = seed;
}

// A tensor as it travels.
struct Sent {
    cudaIpcMemHandle_t block;
    size_t offset;
    cudaIpcEventHandle_t event;
    unsigned seed;
    int counter;
};

// Reference counters of the sending process, in a file that both map.
struct Counters {
    char name[64];
    volatile int64_t *values;

    void map(bool create) {
        int file = shm_open(name, create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);
        EXPECT(file >= 0);
        EXPECT(!create || ftruncate(file, TENSORS * sizeof *values) == 0);
        void *at = mmap(nullptr, TENSORS * sizeof *values, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        EXPECT(at != MAP_FAILED);
        values = static_cast<volatile int64_t *>(at);
        close(file);
    }

    void change(int index, int64_t by) const {
        __atomic_fetch_add(const_cast<int64_t *>(&values[index]), by, __ATOMIC_SEQ_CST);
    }
};

static int receiver(const Peer &peer) {
    CHECK(cudaFree(nullptr));
    auto counters = peer.receive<Counters>();
    counters.map(false);
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    unsigned *wrong, count;
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    CHECK(cudaMemset(wrong, 0, sizeof *wrong));
    CHECK(cudaDeviceSynchronize());
    // Blocks stay open while a tensor of theirs lives, by the bytes of their handles.
    std::map<std::string, std::pair<char *, int>> blocks;
    std::vector<std::pair<std::string, int>> alive;
    auto release = [&] {
        // The sender may use the memory again from here on.
        CHECK(cudaStreamSynchronize(stream));
        counters.change(alive.front().second, -1);
        auto &block = blocks[alive.front().first];
        if (--block.second == 0) {
            CHECK(cudaIpcCloseMemHandle(block.first));
            blocks.erase(alive.front().first);
        }
        alive.erase(alive.begin());
    };
    for (int i = 0; i < TENSORS; i++) {
        auto sent = peer.receive<Sent>();
        cudaEvent_t event;
        CHECK(cudaIpcOpenEventHandle(&event, sent.event));
        CHECK(cudaStreamWaitEvent(stream, event, 0));  // and never destroyed, as in PyTorch
        std::string key(reinterpret_cast<char *>(&sent.block), sizeof sent.block);
        auto &block = blocks[key];
        if (block.second++ == 0) {
            void *at;
            CHECK(cudaIpcOpenMemHandle(&at, sent.block, cudaIpcMemLazyEnablePeerAccess));
            block.first = static_cast<char *>(at);
        }
        auto *values = reinterpret_cast<unsigned *>(block.first + sent.offset);
        use<<<(WORDS + 127) / 128, 128, 0, stream>>>(values, sent.seed, wrong);
        CHECK(cudaGetLastError());
        alive.emplace_back(key, sent.counter);
        if (alive.size() > ALIVE / 2) release();
    }
    while (!alive.empty()) release();
    CHECK(cudaMemcpy(&count, wrong, sizeof count, cudaMemcpyDeviceToHost));
    EXPECT(count == 0);
    peer.tell();
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3) return receiver(parent(argv));
    CHECK(cudaFree(nullptr));
    Counters counters;
    std::snprintf(counters.name, sizeof counters.name, "/torch_%d_%u", getpid(), 12345u);
    counters.map(true);
    Peer peer = start("receiver");
    peer.send(counters);
    char *blocks[2];
    for (char *&block : blocks) CHECK(cudaMalloc(&block, BLOCK));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    struct Place {
        cudaEvent_t event;
        int counter = -1;
    } places[ALIVE];
    unsigned waits = 0;
    for (int i = 0; i < TENSORS; i++) {
        // A part of a block is in limbo until its counter says that the receiver has let go.
        Place &place = places[i % ALIVE];
        if (place.counter >= 0) {
            for (; counters.values[place.counter] != 0; waits++) usleep(100);
            CHECK(cudaEventDestroy(place.event));
        }
        place.counter = i;
        counters.change(i, 1);
        Sent sent = {};
        char *block = blocks[i % ALIVE / (ALIVE / 2)];
        sent.offset = size_t(i % (ALIVE / 2)) * (4 << 20) + 512;
        sent.seed = unsigned(i) * 1000u, sent.counter = i;
        fill<<<(WORDS + 127) / 128, 128, 0, stream>>>(reinterpret_cast<unsigned *>(block + sent.offset), sent.seed);
        CHECK(cudaGetLastError());
        CHECK(cudaIpcGetMemHandle(&sent.block, block));
        CHECK(cudaEventCreateWithFlags(&place.event, cudaEventDisableTiming | cudaEventInterprocess | cudaEventBlockingSync));
        CHECK(cudaEventRecord(place.event, stream));
        CHECK(cudaIpcGetEventHandle(&sent.event, place.event));
        peer.send(sent);
    }
    peer.hear();
    EXPECT(peer.end() == 0);
    for (int i = 0; i < TENSORS; i++) EXPECT(counters.values[i] == 0);
    shm_unlink(counters.name);
    std::printf("ipcTensors: %d tensors right\n", TENSORS);
    return 0;
}

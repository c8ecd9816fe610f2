// Memory of cudaMalloc in two processes: handles, wrong calls, and ends in any order.
#include "processes.h"

constexpr size_t SIZE = 3 << 20;

__global__ void add(unsigned *value, unsigned amount) { *value += amount; }

static unsigned read_word(const void *word) {
    unsigned value;
    CHECK(cudaMemcpy(&value, word, sizeof value, cudaMemcpyDeviceToHost));
    return value;
}

static void *open_handle(const cudaIpcMemHandle_t &handle) {
    void *opened;
    CHECK(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess));
    return opened;
}

static int child(const Peer &peer) {
    CHECK(cudaFree(nullptr));
    auto handle = peer.receive<cudaIpcMemHandle_t>();
    cudaIpcMemHandle_t junk;
    std::memset(&junk, 0x5a, sizeof junk);
    void *none;
    SAY("child: open of other bytes", cudaIpcOpenMemHandle(&none, junk, cudaIpcMemLazyEnablePeerAccess));
    SAY("child: open without the flag", cudaIpcOpenMemHandle(&none, handle, 0));
    auto *memory = static_cast<char *>(open_handle(handle));
    std::printf("child: the same address again: %d\n", open_handle(handle) == memory);
    SAY("child: handle of opened memory", cudaIpcGetMemHandle(&junk, memory));
    SAY("child: free of opened memory", cudaFree(memory));
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, memory));
    std::printf("child: type %d device %d\n", attributes.type, attributes.device);
    std::printf("child: reads %u and %u\n", read_word(memory), read_word(memory + SIZE - 4));
    add<<<1, 1>>>(reinterpret_cast<unsigned *>(memory), 1);
    CHECK(cudaDeviceSynchronize());
    peer.tell();
    peer.hear();
    // The other one has freed it.
    std::printf("child: still reads %u\n", read_word(memory));
    SAY("child: close of an inner address", cudaIpcCloseMemHandle(memory + 8));
    SAY("child: close", cudaIpcCloseMemHandle(memory));
    std::printf("child: opened twice, closed once: %u\n", read_word(memory));
    SAY("child: close", cudaIpcCloseMemHandle(memory));
    SAY("child: close", cudaIpcCloseMemHandle(memory));
    SAY("child: open of freed memory", cudaIpcOpenMemHandle(&none, handle, cudaIpcMemLazyEnablePeerAccess));
    return 0;
}

// Opens memory, and is killed.
static int victim(const Peer &peer) {
    CHECK(cudaFree(nullptr));
    std::printf("victim: reads %u\n", read_word(open_handle(peer.receive<cudaIpcMemHandle_t>())));
    std::fflush(stdout);
    peer.tell();
    peer.hear();
    return 0;
}

// Shares memory, and is killed.
static int owner(const Peer &peer) {
    CHECK(cudaFree(nullptr));
    unsigned *memory, value = 70;
    CHECK(cudaMalloc(&memory, SIZE));
    CHECK(cudaMemcpy(memory, &value, sizeof value, cudaMemcpyHostToDevice));
    cudaIpcMemHandle_t handle;
    CHECK(cudaIpcGetMemHandle(&handle, memory));
    CHECK(cudaDeviceSynchronize());
    peer.send(handle);
    peer.hear();
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3) {
        Peer peer = parent(argv);
        return argv[1][0] == 'c' ? child(peer) : argv[1][0] == 'v' ? victim(peer) : owner(peer);
    }
    CHECK(cudaFree(nullptr));
    char *memory;
    void *pinned, *none;
    CHECK(cudaMalloc(&memory, SIZE));
    CHECK(cudaMallocHost(&pinned, 4096));
    unsigned first = 11, last = 22;
    CHECK(cudaMemcpy(memory, &first, sizeof first, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(memory + SIZE - 4, &last, sizeof last, cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());
    cudaIpcMemHandle_t handle, again, other;
    CHECK(cudaIpcGetMemHandle(&handle, memory));
    CHECK(cudaIpcGetMemHandle(&again, memory));
    std::printf("the same handle twice: %d\n", std::memcmp(&handle, &again, sizeof handle) == 0);
    SAY("handle of pinned memory", cudaIpcGetMemHandle(&other, pinned));
    SAY("open of its own", cudaIpcOpenMemHandle(&none, handle, cudaIpcMemLazyEnablePeerAccess));
    SAY("close of its own", cudaIpcCloseMemHandle(memory));
    std::fflush(stdout);
    Peer peer = start("child");
    peer.send(handle);
    peer.hear();
    std::printf("the child's kernel: %u\n", read_word(memory));
    std::fflush(stdout);
    CHECK(cudaFree(memory));
    peer.tell();
    EXPECT(peer.end() == 0);
    // One side is killed; the other continues.
    unsigned *kept;
    CHECK(cudaMalloc(&kept, SIZE));
    CHECK(cudaMemcpy(kept, &last, sizeof last, cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaIpcGetMemHandle(&handle, kept));
    Peer killed = start("victim");
    killed.send(handle);
    killed.hear();
    EXPECT(kill(killed.pid, SIGKILL) == 0);
    EXPECT(WIFSIGNALED(killed.end()));
    std::printf("after the kill: %u\n", read_word(kept));
    Peer gone = start("owner");
    void *theirs = open_handle(gone.receive<cudaIpcMemHandle_t>());
    EXPECT(kill(gone.pid, SIGKILL) == 0);
    EXPECT(WIFSIGNALED(gone.end()));
    std::printf("memory of a killed process: %u\n", read_word(theirs));
    CHECK(cudaIpcCloseMemHandle(theirs));
    std::printf("ipcMemory: right\n");
    return 0;
}

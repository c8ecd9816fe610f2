// A memory pool in several processes: descriptors and pointers, wrong calls, and ends in any order.
#include "processes.h"

#include <fcntl.h>

constexpr size_t SIZE = 3 << 20;
constexpr unsigned ROUNDS = 50;
constexpr auto POSIX_FD = cudaMemHandleTypePosixFileDescriptor;

__global__ void add(unsigned *value, unsigned amount) { *value += amount; }

static unsigned read_word(const void *word) {
    unsigned value;
    CHECK(cudaMemcpy(&value, word, sizeof value, cudaMemcpyDeviceToHost));
    return value;
}

static void write_word(void *word, unsigned value) {
    CHECK(cudaMemcpy(word, &value, sizeof value, cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());
}

static cudaMemPool_t create_pool(cudaMemAllocationHandleType types) {
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.handleTypes = types;
    properties.location.type = cudaMemLocationTypeDevice;
    cudaMemPool_t pool;
    CHECK(cudaMemPoolCreate(&pool, &properties));
    return pool;
}

// Allocates memory with a value at its begin and one at its end.
static char *allocate(cudaMemPool_t pool, unsigned first, unsigned last) {
    void *memory;
    CHECK(cudaMallocFromPoolAsync(&memory, SIZE, pool, nullptr));
    write_word(memory, first);
    write_word(static_cast<char *>(memory) + SIZE - 4, last);
    return static_cast<char *>(memory);
}

static int export_pool(cudaMemPool_t pool) {
    int descriptor;
    CHECK(cudaMemPoolExportToShareableHandle(&descriptor, pool, POSIX_FD, 0));
    return descriptor;
}

static cudaMemPoolPtrExportData export_pointer(void *memory) {
    cudaMemPoolPtrExportData data;
    CHECK(cudaMemPoolExportPointer(&data, memory));
    return data;
}

static void *handle_of(int descriptor) { return reinterpret_cast<void *>(uintptr_t(descriptor)); }

static cudaMemPool_t import_pool(int descriptor) {
    cudaMemPool_t pool;
    CHECK(cudaMemPoolImportFromShareableHandle(&pool, handle_of(descriptor), POSIX_FD, 0));
    return pool;
}

static char *import_pointer(cudaMemPool_t pool, cudaMemPoolPtrExportData data) {
    void *memory;
    CHECK(cudaMemPoolImportPointer(&memory, pool, &data));
    return static_cast<char *>(memory);
}

// Calls that an imported pool refuses.
static void wrong_calls(cudaMemPool_t pool) {
    cuuint64_t value;
    int descriptor;
    void *none;
    SAY("child: attribute", cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &value));
    SAY("child: allocation", cudaMallocFromPoolAsync(&none, SIZE, pool, nullptr));
    SAY("child: export", cudaMemPoolExportToShareableHandle(&descriptor, pool, POSIX_FD, 0));
    SAY("child: as the device's pool", cudaDeviceSetMemPool(0, pool));
    cudaMemLocation location = {};
    location.type = cudaMemLocationTypeDevice;
    cudaMemAccessFlags access;
    CHECK(cudaMemPoolGetAccess(&access, pool, &location));
    std::printf("child: access %d\n", access);
}

static int child(const Peer &peer) {
    CHECK(cudaFree(nullptr));
    int descriptor = peer.receive_descriptor(), null = open("/dev/null", O_RDONLY);
    auto data = peer.receive<cudaMemPoolPtrExportData>(), foreign = peer.receive<cudaMemPoolPtrExportData>(), junk = data;
    std::memset(&junk, 0x5a, sizeof junk);
    cudaMemPool_t pool, other;
    void *none;
    SAY("child: import of no kind", cudaMemPoolImportFromShareableHandle(&other, handle_of(descriptor), cudaMemHandleTypeNone, 0));
    SAY("child: import of another file", cudaMemPoolImportFromShareableHandle(&other, handle_of(null), POSIX_FD, 0));
    pool = import_pool(descriptor);
    close(descriptor);
    wrong_calls(pool);
    SAY("child: pointer of other bytes", cudaMemPoolImportPointer(&none, pool, &junk));
    SAY("child: pointer of another pool", cudaMemPoolImportPointer(&none, pool, &foreign));
    char *memory = import_pointer(pool, data);
    std::printf("child: the same address again: %d\n", import_pointer(pool, data) == memory);
    SAY("child: export of imported memory", cudaMemPoolExportPointer(&junk, memory));
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, memory));
    std::printf("child: type %d device %d\n", attributes.type, attributes.device);
    std::printf("child: reads %u and %u\n", read_word(memory), read_word(memory + SIZE - 4));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (unsigned round = 0; round < ROUNDS; round++) {
        add<<<1, 1, 0, stream>>>(reinterpret_cast<unsigned *>(memory), 1);
        CHECK(cudaGetLastError());
        CHECK(cudaStreamSynchronize(stream));
        peer.tell();
        peer.hear();
    }
    std::printf("child: after %u rounds: %u\n", ROUNDS, read_word(memory));
    SAY("child: free", cudaFreeAsync(memory, stream));
    CHECK(cudaStreamSynchronize(stream));
    // It was imported twice.
    SAY("child: free", cudaFree(memory));
    SAY("child: free", cudaFree(memory));
    memory = import_pointer(pool, data);
    std::printf("child: imported again, reads %u\n", read_word(memory));
    // The pool may go before its memory.
    SAY("child: end of the pool", cudaMemPoolDestroy(pool));
    std::printf("child: still reads %u\n", read_word(memory));
    SAY("child: free", cudaFreeAsync(memory, stream));
    CHECK(cudaStreamSynchronize(stream));
    return 0;
}

// Imports memory, and is killed.
static int victim(const Peer &peer) {
    CHECK(cudaFree(nullptr));
    cudaMemPool_t pool = import_pool(peer.receive_descriptor());
    std::printf("victim: reads %u\n", read_word(import_pointer(pool, peer.receive<cudaMemPoolPtrExportData>())));
    std::fflush(stdout);
    peer.tell();
    peer.hear();
    return 0;
}

// Shares a pool, and is killed.
static int owner(const Peer &peer) {
    CHECK(cudaFree(nullptr));
    cudaMemPool_t pool = create_pool(POSIX_FD);
    char *memory = allocate(pool, 70, 71);
    peer.send_descriptor(export_pool(pool));
    peer.send(export_pointer(memory));
    peer.hear();
    return 0;
}

// Calls that fail in the process of a pool.
static void wrong_exports(char *memory) {
    cudaMemPool_t plain = create_pool(cudaMemHandleTypeNone), usual;
    CHECK(cudaDeviceGetDefaultMemPool(&usual, 0));
    void *of_plain = allocate(plain, 1, 2), *of_none;
    CHECK(cudaMalloc(&of_none, SIZE));
    int descriptor;
    cudaMemPoolPtrExportData data;
    SAY("export of a plain pool", cudaMemPoolExportToShareableHandle(&descriptor, plain, POSIX_FD, 0));
    SAY("export of the default pool", cudaMemPoolExportToShareableHandle(&descriptor, usual, POSIX_FD, 0));
    SAY("pointer of a plain pool", cudaMemPoolExportPointer(&data, of_plain));
    SAY("pointer of no pool", cudaMemPoolExportPointer(&data, of_none));
    SAY("inner pointer", cudaMemPoolExportPointer(&data, memory + 256));
    CHECK(cudaFree(of_none));
    CHECK(cudaFree(of_plain));
    CHECK(cudaMemPoolDestroy(plain));
}

int main(int argc, char **argv) {
    if (argc == 3) {
        Peer peer = parent(argv);
        return argv[1][0] == 'c' ? child(peer) : argv[1][0] == 'v' ? victim(peer) : owner(peer);
    }
    CHECK(cudaFree(nullptr));
    int types;
    CHECK(cudaDeviceGetAttribute(&types, cudaDevAttrMemoryPoolSupportedHandleTypes, 0));
    std::printf("pools have descriptors: %d\n", (types & POSIX_FD) != 0);
    cudaMemPool_t pool = create_pool(POSIX_FD), second = create_pool(POSIX_FD);
    char *memory = allocate(pool, 11, 22), *foreign = allocate(second, 33, 44);
    wrong_exports(memory);
    cudaMemPoolPtrExportData data;
    SAY("pointer of a pool that is not shared", cudaMemPoolExportPointer(&data, foreign));
    int descriptor = export_pool(pool);
    CHECK(close(export_pool(second)) == 0 ? cudaSuccess : cudaErrorUnknown);
    Peer peer = start("child");
    peer.send_descriptor(descriptor);
    peer.send(export_pointer(memory));
    peer.send(export_pointer(foreign));
    // Each one adds to what the other one has left.
    for (unsigned round = 0; round < ROUNDS; round++) {
        peer.hear();
        EXPECT(read_word(memory) == 11 + 11 * round + 1);
        unsigned next = 11 + 11 * (round + 1);
        CHECK(cudaMemcpy(memory, &next, sizeof next, cudaMemcpyHostToDevice));
        CHECK(cudaStreamSynchronize(nullptr));  // bytes of pageable memory may still be on their way
        peer.tell();
    }
    EXPECT(peer.end() == 0);
    std::printf("the first process still reads %u\n", read_word(memory));
    // One side is killed; the other continues.
    std::fflush(stdout);
    Peer killed = start("victim");
    killed.send_descriptor(descriptor);
    killed.send(export_pointer(memory));
    killed.hear();
    EXPECT(kill(killed.pid, SIGKILL) == 0);
    EXPECT(WIFSIGNALED(killed.end()));
    std::printf("after the kill: %u\n", read_word(memory));
    CHECK(cudaFree(memory));
    CHECK(cudaFree(foreign));
    CHECK(cudaMemPoolDestroy(pool));
    CHECK(cudaMemPoolDestroy(second));
    Peer gone = start("owner");
    cudaMemPool_t theirs = import_pool(gone.receive_descriptor());
    char *kept = import_pointer(theirs, gone.receive<cudaMemPoolPtrExportData>());
    EXPECT(kill(gone.pid, SIGKILL) == 0);
    EXPECT(WIFSIGNALED(gone.end()));
    std::printf("memory of a killed process: %u and %u\n", read_word(kept), read_word(kept + SIZE - 4));
    CHECK(cudaFree(kept));
    CHECK(cudaMemPoolDestroy(theirs));
    std::printf("ipcPool: right\n");
    return 0;
}

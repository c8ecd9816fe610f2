// Events of two processes: streams of one wait for records of the other, without their programs.
#include "processes.h"

constexpr int ROUNDS = 200;

__global__ void add(unsigned *value, unsigned amount) { *value += amount; }

__global__ void times(unsigned *value, unsigned factor) { *value *= factor; }

// Loads the kernels: a first launch would wait for streams that stand still.
static void load() {
    cudaFuncAttributes attributes;
    CHECK(cudaFuncGetAttributes(&attributes, add));
    CHECK(cudaFuncGetAttributes(&attributes, times));
    unsigned *word;
    CHECK(cudaMalloc(&word, sizeof *word));
    add<<<1, 1>>>(word, 0);
    times<<<1, 1>>>(word, 0);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(word));
}

static unsigned read_word(const unsigned *word) {
    unsigned value;
    CHECK(cudaMemcpy(&value, word, sizeof value, cudaMemcpyDeviceToHost));
    return value;
}

static int child(const Peer &peer) {
    load();
    auto handle = peer.receive<cudaIpcEventHandle_t>();
    cudaIpcEventHandle_t junk;
    std::memset(&junk, 0x5a, sizeof junk);
    cudaEvent_t event, none, own;
    SAY("child: open of other bytes", cudaIpcOpenEventHandle(&none, junk));
    CHECK(cudaIpcOpenEventHandle(&event, handle));
    SAY("child: handle of an opened event", cudaIpcGetEventHandle(&junk, event));
    unsigned *word;
    CHECK(cudaIpcOpenMemHandle(reinterpret_cast<void **>(&word), peer.receive<cudaIpcMemHandle_t>(),
                               cudaIpcMemLazyEnablePeerAccess));
    // The record behind the other one's stopped stream precedes this process.
    SAY("child: query of a pending record", cudaEventQuery(event));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamWaitEvent(stream, event, 0));
    times<<<1, 1, 0, stream>>>(word, 5);
    CHECK(cudaGetLastError());
    SAY("child: stream behind it", cudaStreamQuery(stream));
    peer.tell();
    CHECK(cudaEventSynchronize(event));
    CHECK(cudaStreamSynchronize(stream));
    std::printf("child: (7 + 3) * 5 = %u\n", read_word(word));
    SAY("child: query of a complete record", cudaEventQuery(event));
    CHECK(cudaEventCreateWithFlags(&own, cudaEventDisableTiming));
    float ms;
    SAY("child: elapsed time", cudaEventElapsedTime(&ms, own, event));
    // A record of this process, behind a stream that stands still.
    Stopped stopped;
    add<<<1, 1, 0, stopped.stream>>>(word, 4);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(event, stopped.stream));
    peer.tell();
    peer.hear();
    stopped.let_go();
    peer.hear();
    for (int round = 0; round < ROUNDS; round++) {
        peer.hear();
        CHECK(cudaStreamWaitEvent(stream, event, 0));
        times<<<1, 1, 0, stream>>>(word, 3);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(event, stream));
        peer.tell();
    }
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaEventDestroy(event));
    CHECK(cudaIpcCloseMemHandle(word));
    std::printf("child: closed\n");
    std::fflush(stdout);
    return 0;
}

// Opens everything, and is killed.
static int victim(const Peer &peer) {
    CHECK(cudaFree(nullptr));
    cudaEvent_t event;
    CHECK(cudaIpcOpenEventHandle(&event, peer.receive<cudaIpcEventHandle_t>()));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamWaitEvent(stream, event, 0));
    CHECK(cudaEventRecord(event, stream));
    CHECK(cudaEventSynchronize(event));
    peer.tell();
    peer.hear();
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3) return argv[1][0] == 'c' ? child(parent(argv)) : victim(parent(argv));
    load();
    int supported = 0;
    DRIVER(cuDeviceGetAttribute);
    CHECK_DRIVER(cuDeviceGetAttribute_(&supported, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 0));
    std::printf("ipcEvent: supported %d\n", supported);
    cudaEvent_t event, plain, none;
    cudaIpcEventHandle_t handle, again;
    SAY("create with times", cudaEventCreateWithFlags(&none, cudaEventInterprocess));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventInterprocess | cudaEventDisableTiming | cudaEventBlockingSync));
    CHECK(cudaEventCreateWithFlags(&plain, cudaEventDisableTiming));
    SAY("handle of a plain event", cudaIpcGetEventHandle(&handle, plain));
    unsigned *word, seven = 7;
    CHECK(cudaMalloc(&word, sizeof *word));
    CHECK(cudaMemcpy(word, &seven, sizeof seven, cudaMemcpyHostToDevice));
    Stopped stopped;
    add<<<1, 1, 0, stopped.stream>>>(word, 3);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(event, stopped.stream));
    CHECK(cudaIpcGetEventHandle(&handle, event));
    CHECK(cudaIpcGetEventHandle(&again, event));
    std::printf("the same handle twice: %d\n", std::memcmp(&handle, &again, sizeof handle) == 0);
    SAY("open of its own", cudaIpcOpenEventHandle(&none, handle));
    cudaIpcMemHandle_t memory;
    CHECK(cudaIpcGetMemHandle(&memory, word));
    std::fflush(stdout);
    Peer peer = start("child");
    peer.send(handle);
    peer.send(memory);
    peer.hear();
    stopped.let_go();
    peer.hear();
    // The child has recorded.
    SAY("query of the child's record", cudaEventQuery(event));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamWaitEvent(stream, event, 0));
    times<<<1, 1, 0, stream>>>(word, 2);
    CHECK(cudaGetLastError());
    SAY("stream behind it", cudaStreamQuery(stream));
    peer.tell();
    CHECK(cudaEventSynchronize(event));
    CHECK(cudaStreamSynchronize(stream));
    std::printf("(50 + 4) * 2 = %u\n", read_word(word));
    CHECK(cudaMemset(word, 0, sizeof *word));
    CHECK(cudaDeviceSynchronize());
    peer.tell();
    unsigned expected = 0;
    for (int round = 0; round < ROUNDS; round++) {
        // Each program goes ahead of both devices.
        CHECK(cudaStreamWaitEvent(stream, event, 0));
        add<<<1, 1, 0, stream>>>(word, 1);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(event, stream));
        peer.tell();
        peer.hear();
        expected = (expected + 1) * 3;
    }
    EXPECT(peer.end() == 0);
    CHECK(cudaDeviceSynchronize());
    EXPECT(read_word(word) == expected);
    std::printf("%d rounds right\n", ROUNDS);
    Peer killed = start("victim");
    killed.send(handle);
    killed.hear();
    EXPECT(kill(killed.pid, SIGKILL) == 0);
    EXPECT(WIFSIGNALED(killed.end()));
    CHECK(cudaEventRecord(event, stream));
    CHECK(cudaEventSynchronize(event));
    CHECK(cudaEventDestroy(event));
    std::printf("ipcEvent: right\n");
    return 0;
}

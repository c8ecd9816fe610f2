// Host memory is right as soon as the program may look at it. That is after events that launches
// record, graphs that wait for events, and older copies of graphs.
#include "driver.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <vector>

const size_t BYTES = 32 << 20;
const int ROUNDS = 4;

__global__ void late(int *out, int rounds) {
    int x = 1;
    for (int i = 0; i < rounds; i++) x = x * 1664525 + 1013904223;
    *out = x;
}

const int LOOPS = 20000;

static int late_result() {
    unsigned x = 1;
    for (int i = 0; i < LOOPS; i++) x = x * 1664525u + 1013904223u;
    return int(x);
}

static unsigned char *device_with(int value) {
    unsigned char *made;
    CHECK(cudaMalloc(&made, BYTES));
    CHECK(cudaMemset(made, value, BYTES));
    CHECK(cudaDeviceSynchronize());
    return made;
}

static bool all(const unsigned char *host, int value) {
    return host[0] == value && std::memcmp(host, host + 1, BYTES - 1) == 0;
}

static cudaStream_t new_stream() {
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

static cudaEvent_t new_event() {
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}

static cudaGraphExec_t instantiate(cudaGraph_t graph) {
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return executable;
}

// A launch of one thread that records an event when the kernel begins.
struct RecordingLaunch {
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    RecordingLaunch(cudaEvent_t event, cudaStream_t stream) {
        attribute.id = cudaLaunchAttributeLaunchCompletionEvent;
        attribute.val.launchCompletionEvent.event = event;
        config.gridDim = config.blockDim = dim3(1);
        config.stream = stream;
        config.attrs = &attribute;
        config.numAttrs = 1;
    }
    RecordingLaunch(const RecordingLaunch &) = delete;
};

// The event happens when the kernel begins: copies before it are complete, and the kernel is not.
static void events_of_launches(unsigned char *host, unsigned char *device) {
    cudaStream_t stream = new_stream(), other = new_stream();
    cudaEvent_t event = new_event(), joined = new_event();
    int *out;
    CHECK(cudaHostAlloc(&out, sizeof(int), cudaHostAllocMapped));
    const RecordingLaunch launch(event, stream);
    for (int round = 0; round < 3 * ROUNDS; round++) {
        std::memset(host, 0, BYTES);
        *out = 0;
        CHECK(cudaMemset(device, round + 1, BYTES));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpyAsync(host, device, BYTES, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaLaunchKernelEx(&launch.config, late, out, LOOPS));
        if (round % 3 == 0) {
            CHECK(cudaEventSynchronize(event));
        } else if (round % 3 == 1) {
            cudaError_t status;
            while ((status = cudaEventQuery(event)) == cudaErrorNotReady) {
            }
            CHECK(status);
        } else {
            CHECK(cudaStreamWaitEvent(other, event, 0));
            CHECK(cudaStreamSynchronize(other));
        }
        EXPECT(all(host, round + 1));
        CHECK(cudaStreamSynchronize(stream));
        EXPECT(*out == late_result());
    }
    // In a capture the event joins another stream.
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaLaunchKernelEx(&launch.config, late, out, LOOPS));
    CHECK(cudaStreamWaitEvent(other, event, 0));
    late<<<1, 1, 0, other>>>(out + 0, LOOPS);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(joined, other));
    CHECK(cudaStreamWaitEvent(stream, joined, 0));
    std::printf("event of a launch in a capture -> %s\n", cudaGetErrorName(cudaEventQuery(event)));
    cudaGetLastError();
    cudaStreamEndCapture(stream, &graph);
    cudaGetLastError();
    std::printf("landing: events of launches right\n");
}

// Another stream copies what an upload writes that is still on its way when the copy is posted.
static void uploads_before_events(unsigned char *host, unsigned char *device, unsigned char *copied) {
    cudaStream_t stream = new_stream(), other = new_stream();
    cudaEvent_t event = new_event();
    const RecordingLaunch launch(event, stream);
    int *out;
    CHECK(cudaMalloc(&out, sizeof(int)));
    CHECK(cudaLaunchKernelEx(&launch.config, late, out, 1));  // the shape is known from now on
    CHECK(cudaStreamSynchronize(stream));
    cudaGraph_t graph;
    cudaGraphNode_t node;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddEventRecordNode(&node, graph, nullptr, 0, event));
    cudaGraphExec_t records = instantiate(graph);
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddEventWaitNode(&node, graph, nullptr, 0, event));
    cudaGraphExec_t waits = instantiate(graph);
    for (int round = 0; round < 4 * ROUNDS; round++) {
        std::memset(host, round + 1, BYTES);
        CHECK(cudaMemcpyAsync(device, host, BYTES, cudaMemcpyHostToDevice, stream));
        if (round % 4 == 0) {
            CHECK(cudaGraphLaunch(records, stream));
            CHECK(cudaStreamWaitEvent(other, event, 0));
        } else if (round % 4 == 1) {
            CHECK(cudaEventRecord(event, stream));
            CHECK(cudaGraphLaunch(waits, other));
        } else {
            CHECK(cudaLaunchKernelEx(&launch.config, late, out, 1));
            if (round % 4 == 2) {
                CHECK(cudaStreamWaitEvent(other, event, 0));
            } else {
                CHECK(cudaEventSynchronize(event));
            }
        }
        CHECK(cudaMemcpyAsync(copied, device, BYTES, cudaMemcpyDeviceToDevice, other));
        CHECK(cudaStreamSynchronize(other));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaMemcpy(host, copied, BYTES, cudaMemcpyDeviceToHost));
        EXPECT(all(host, round + 1));
    }
    CHECK(cudaGraphExecDestroy(records));
    CHECK(cudaGraphExecDestroy(waits));
    std::printf("landing: uploads before events right\n");
}

// Each round has another source, and the one before is unmapped.
static void changed_nodes(unsigned char *device) {
    const size_t size = 16 << 20;
    const auto map = [&] {
        void *mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        EXPECT(mapped != MAP_FAILED);
        return static_cast<unsigned char *>(mapped);
    };
    std::vector<unsigned char> result(size);
    cudaStream_t stream = new_stream();
    cudaGraph_t graph, other;
    cudaGraphNode_t node, copy;
    unsigned char *source = map(), *before = nullptr;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemcpyNode1D(&node, graph, nullptr, 0, device, source, size, cudaMemcpyHostToDevice));
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int round = 0; round < 40; round++) {
        std::memset(source, round + 1, size);
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaMemcpyAsync(result.data(), device, size, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        EXPECT(result[0] == round + 1 && std::memcmp(&result[0], &result[1], size - 1) == 0);
        if (before) EXPECT(munmap(before, size) == 0);
        before = source;
        source = map();
        if (round % 2 == 0) {
            CHECK(cudaGraphExecMemcpyNodeSetParams1D(executable, node, device, source, size, cudaMemcpyHostToDevice));
        } else {
            cudaGraphExecUpdateResultInfo info;
            CHECK(cudaGraphCreate(&other, 0));
            CHECK(cudaGraphAddMemcpyNode1D(&copy, other, nullptr, 0, device, source, size, cudaMemcpyHostToDevice));
            CHECK(cudaGraphExecUpdate(executable, other, &info));
            CHECK(cudaGraphDestroy(other));
        }
    }
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    std::printf("landing: changed nodes right\n");
}

static void CUDART_CB fill_slowly(void *data) {
    usleep(100000);
    std::memset(data, 7, BYTES);
}

// A copy from pageable memory that is not asynchronous reads it when the stream's work is complete.
static void copies_behind_host_work(unsigned char *device) {
    std::vector<unsigned char> host(BYTES), result(BYTES);
    cudaStream_t capturing = new_stream();
    CHECK(cudaLaunchHostFunc(0, fill_slowly, host.data()));
    CHECK(cudaMemcpy(device, host.data(), BYTES, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(result.data(), device, BYTES, cudaMemcpyDeviceToHost));
    EXPECT(all(result.data(), 7));
    std::memset(host.data(), 1, BYTES);
    CHECK(cudaLaunchHostFunc(0, fill_slowly, host.data()));
    const size_t width = 1 << 16;
    CHECK(cudaMemcpy2D(device, width, host.data(), width, width, BYTES / width, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(result.data(), device, BYTES, cudaMemcpyDeviceToHost));
    EXPECT(all(result.data(), 7));
    cudaGraph_t graph;
    CHECK(cudaMemset(device, 3, BYTES));
    CHECK(cudaStreamBeginCapture(capturing, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaMemcpyAsync(host.data(), device, BYTES, cudaMemcpyDeviceToHost, capturing));
    CHECK(cudaStreamEndCapture(capturing, &graph));
    cudaGraphExec_t executable = instantiate(graph);
    CHECK(cudaGraphLaunch(executable, 0));
    CHECK(cudaMemset(device, 4, BYTES));
    CHECK(cudaMemcpy(device, host.data(), BYTES, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(result.data(), device, BYTES, cudaMemcpyDeviceToHost));
    EXPECT(all(result.data(), 3));
    CHECK(cudaGraphExecDestroy(executable));
    std::printf("landing: copies behind host work right\n");
}

// The event is that of a copy on another stream.
static void graphs_that_wait(unsigned char *host, unsigned char *device, bool captured) {
    cudaStream_t stream = new_stream(), other = new_stream();
    cudaEvent_t event = new_event();
    cudaGraph_t graph;
    if (captured) {
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        CHECK(cudaStreamWaitEvent(stream, event, cudaEventWaitExternal));
        CHECK(cudaStreamEndCapture(stream, &graph));
    } else {
        cudaGraphNode_t node;
        CHECK(cudaGraphCreate(&graph, 0));
        CHECK(cudaGraphAddEventWaitNode(&node, graph, nullptr, 0, event));
    }
    cudaGraphExec_t executable = instantiate(graph);
    for (int round = 0; round < ROUNDS; round++) {
        std::memset(host, 0, BYTES);
        CHECK(cudaMemset(device, round + 1, BYTES));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpyAsync(host, device, BYTES, cudaMemcpyDeviceToHost, other));
        CHECK(cudaEventRecord(event, other));
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaStreamSynchronize(stream));
        EXPECT(all(host, round + 1));
    }
    std::printf("landing: graphs that wait for events%s right\n", captured ? ", from captures," : "");
}

// No graph contains a launch.
static void launches_in_captures() {
    cudaStream_t stream = new_stream();
    cudaGraph_t graph;
    cudaGraphNode_t node;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddEmptyNode(&node, graph, nullptr, 0));
    cudaGraphExec_t executable = instantiate(graph);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    SHOW(cudaGraphLaunch(executable, stream));
    SHOW(cudaStreamEndCapture(stream, &graph));
    cudaGetLastError();
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGraphExecDestroy(executable));
}

// The program's own copy comes last.
static void older_copies_of_graphs(unsigned char *older, unsigned char *newer) {
    std::vector<unsigned char> host(BYTES);
    cudaStream_t stream, capturing = new_stream();
    CHECK(cudaStreamCreate(&stream));
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(capturing, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaMemcpyAsync(host.data(), older, BYTES, cudaMemcpyDeviceToHost, capturing));
    CHECK(cudaStreamEndCapture(capturing, &graph));
    cudaGraphExec_t executable = instantiate(graph);
    CHECK(cudaMemset(older, 1, BYTES));
    for (int round = 0; round < 2 * ROUNDS; round++) {
        CHECK(cudaMemset(newer, round + 2, BYTES));
        CHECK(cudaGraphLaunch(executable, stream));
        if (round % 2 == 0) {
            CHECK(cudaMemcpy(host.data(), newer, BYTES, cudaMemcpyDeviceToHost));
        } else {
            const size_t width = 1 << 16;
            CHECK(cudaMemcpy2D(host.data(), width, newer, width, width, BYTES / width, cudaMemcpyDeviceToHost));
        }
        EXPECT(all(host.data(), round + 2));
        CHECK(cudaDeviceSynchronize());
        EXPECT(all(host.data(), round + 2));
    }
    CHECK(cudaGraphExecDestroy(executable));
    std::printf("landing: a copy after an older copy of a graph right\n");
}

// The device's first use of pinned memory is not by a kernel.
static void first_uses_of_pinned_memory() {
    DRIVER_BY_RUNTIME(cuStreamWriteValue32);
    cudaStream_t stream = new_stream();
    unsigned *word;
    CHECK(cudaHostAlloc(&word, sizeof(unsigned), cudaHostAllocDefault));
    *word = 0;
    CHECK_DRIVER(cuStreamWriteValue32_(stream, reinterpret_cast<CUdeviceptr>(word), 7, 0));
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(*word == 7);
    unsigned *filled;
    CHECK(cudaHostAlloc(&filled, 4096, cudaHostAllocDefault));
    std::memset(filled, 0, 4096);
    cudaGraph_t graph;
    cudaGraphNode_t node;
    cudaMemsetParams fill = {};
    fill.dst = filled;
    fill.elementSize = 4;
    fill.value = 0x01020304;
    fill.width = 1024;
    fill.height = 1;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemsetNode(&node, graph, nullptr, 0, &fill));
    // The flag counts at the instantiation only.
    cudaGraphInstantiateParams params = {};
    params.flags = cudaGraphInstantiateFlagUpload;
    params.uploadStream = stream;
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiateWithParams(&executable, graph, &params));
    EXPECT(params.result_out == cudaGraphInstantiateSuccess);
    unsigned long long flags = 99;
    CHECK(cudaGraphExecGetFlags(executable, &flags));
    EXPECT(flags == 0);
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < 1024; i++) EXPECT(filled[i] == 0x01020304);
    std::printf("landing: first uses of pinned memory right\n");
}

int main() {
    unsigned char *host;
    CHECK(cudaHostAlloc(&host, BYTES, cudaHostAllocDefault));
    unsigned char *device = device_with(1), *other = device_with(2);
    events_of_launches(host, device);
    graphs_that_wait(host, device, false);
    graphs_that_wait(host, device, true);
    launches_in_captures();
    uploads_before_events(host, device, other);
    changed_nodes(device);
    copies_behind_host_work(device);
    older_copies_of_graphs(device, other);
    first_uses_of_pinned_memory();
    return 0;
}

// Order of copies and other users of host memory.
//
// Copies from pinned memory read it in stream order, whatever writes it before: a copy of another
// stream, a host function, a host function of a graph, a kernel that maps it. Synchronous copies
// have read it when they return. The next kernel sees copies to memory that a kernel maps. Copies
// of managed memory wait for the kernel that writes it. Copies within the host wait for the writers
// of their source.
#include "check.h"

#include <atomic>
#include <cstring>
#include <thread>

__global__ void fill(int *values, int count, int value) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) values[i] = value + i;
}

__global__ void add(int *values, int count, int value) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) values[i] += value;
}

struct Work {
    int *values;
    int count, first;
};

static void write(void *data) {
    const Work *work = static_cast<const Work *>(data);
    for (int i = 0; i < work->count; i++) work->values[i] = work->first + i;
}

struct Look {
    const int *values;
    int count, first, right;
};

static void look_at(void *data) {
    Look *look = static_cast<Look *>(data);
    look->right = 1;
    for (int i = look->count - 1; i >= 0; i--) look->right &= look->values[i] == look->first + i;
}

static void wait_for(void *data) {
    while (!static_cast<std::atomic<int> *>(data)->load()) std::this_thread::yield();
}

static void expect_at(int line, const int *values, int count, int first) {
    for (int i = count - 1; i >= 0; i--) {
        if (values[i] == first + i) continue;
        std::printf("FAILED line %d: %d of %d is %d, not %d\n", line, i, count, values[i], first + i);
        std::exit(1);
    }
}

#define expect(values, count, first) expect_at(__LINE__, values, count, first)

int main() {
    const int most = 6 << 20;
    const size_t bytes = most * sizeof(int);
    // Memory that gets a mirror behind a function, and memory that gets none.
    const size_t LITTLE[] = {1 << 20, 4 << 20};
    int *from, *to, *host, *back, *second, *little[2];
    for (int i = 0; i < 2; i++) CHECK(cudaHostAlloc(&little[i], LITTLE[i], cudaHostAllocDefault));
    CHECK(cudaMalloc(&from, bytes));
    CHECK(cudaMalloc(&to, bytes));
    for (int **pinned : {&host, &back, &second}) CHECK(cudaHostAlloc(pinned, bytes, cudaHostAllocDefault));
    cudaStream_t one, two;
    CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking));
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    int first = 0;
    for (int count : {most, 100000, 1000, 1}) {
        const size_t length = count * sizeof(int);
        const auto result = [&](cudaStream_t stream) {
            std::memset(back, 0xff, length);
            CHECK(cudaMemcpyAsync(back, to, length, cudaMemcpyDeviceToHost, stream));
            CHECK(cudaStreamSynchronize(stream));
            expect(back, count, first);
        };
        // Written by another stream's copy, ordered by an event.
        first += 1000;
        std::memset(host, 0xff, length);
        fill<<<64, 256, 0, one>>>(from, count, first);
        CHECK(cudaMemcpyAsync(host, from, length, cudaMemcpyDeviceToHost, one));
        CHECK(cudaEventRecord(event, one));
        CHECK(cudaStreamWaitEvent(two, event, 0));
        CHECK(cudaMemcpyAsync(to, host, length, cudaMemcpyHostToDevice, two));
        result(two);
        // Written by another stream's copy, in rows.
        first += 1000;
        fill<<<64, 256, 0, one>>>(from, count, first);
        CHECK(cudaMemcpyAsync(host, from, length, cudaMemcpyDeviceToHost, one));
        CHECK(cudaMemcpy2DAsync(to, length, host, length, length, 1, cudaMemcpyHostToDevice, one));
        result(one);
        // Copied within the host.
        first += 1000;
        fill<<<64, 256, 0, one>>>(from, count, first);
        CHECK(cudaMemcpyAsync(host, from, length, cudaMemcpyDeviceToHost, one));
        CHECK(cudaMemcpyAsync(second, host, length, cudaMemcpyHostToHost, one));
        CHECK(cudaStreamSynchronize(one));
        expect(second, count, first);
        // Written by a host function, twice: the first copy must not read the second function's
        // value.
        Work work[2] = {{host, count, first + 1000}, {host, count, first + 2000}};
        CHECK(cudaLaunchHostFunc(one, write, &work[0]));
        CHECK(cudaMemcpyAsync(from, host, length, cudaMemcpyHostToDevice, one));
        CHECK(cudaLaunchHostFunc(one, write, &work[1]));
        CHECK(cudaMemcpyAsync(to, host, length, cudaMemcpyHostToDevice, one));
        first += 2000;
        result(one);
        CHECK(cudaMemcpy(second, from, length, cudaMemcpyDeviceToHost));
        expect(second, count, first - 1000);
        // Written by a host function of a graph, with a copy after the graph.
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        first += 1000;
        work[0].first = first;
        CHECK(cudaStreamBeginCapture(one, cudaStreamCaptureModeThreadLocal));
        CHECK(cudaLaunchHostFunc(one, write, &work[0]));
        CHECK(cudaStreamEndCapture(one, &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK(cudaGraphLaunch(exec, one));
        CHECK(cudaMemcpyAsync(to, host, length, cudaMemcpyHostToDevice, one));
        result(one);
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
        // Written by a copy in a graph, with a copy after the graph.
        first += 1000;
        fill<<<64, 256, 0, one>>>(from, count, first);
        CHECK(cudaStreamBeginCapture(one, cudaStreamCaptureModeThreadLocal));
        CHECK(cudaMemcpyAsync(second, from, length, cudaMemcpyDeviceToHost, one));
        CHECK(cudaStreamEndCapture(one, &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK(cudaGraphLaunch(exec, one));
        CHECK(cudaMemcpyAsync(to, second, length, cudaMemcpyHostToDevice, one));
        result(one);
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
        // Written by a copy behind a host function that waits for this thread, which meanwhile
        // requests copies both ways.
        std::atomic<int> go(0);
        for (int i = 0; i < 2; i++) {
            first += 1000;
            go = 0;
            fill<<<64, 256, 0, two>>>(from, count, first);
            CHECK(cudaEventRecord(event, two));
            CHECK(cudaLaunchHostFunc(one, wait_for, &go));
            CHECK(cudaStreamWaitEvent(one, event, 0));
            const size_t part = length < LITTLE[i] ? length : LITTLE[i];
            CHECK(cudaMemcpyAsync(little[i], from, part, cudaMemcpyDeviceToHost, one));
            CHECK(cudaMemcpyAsync(to, little[i], part, cudaMemcpyHostToDevice, one));
            CHECK(cudaMemcpyAsync(back, to, part, cudaMemcpyDeviceToHost, one));
            go = 1;
            CHECK(cudaStreamSynchronize(one));
            expect(back, part / sizeof(int), first);
        }
        // Written by a host function behind one that waits for this thread, which requests more
        // copies behind it: from the same memory, from other pinned memory, and of few bytes.
        first += 1000;
        go = 0;
        Work late = {back, count, first};
        std::memset(back, 0xff, length);
        CHECK(cudaLaunchHostFunc(one, wait_for, &go));
        CHECK(cudaLaunchHostFunc(one, write, &late));
        CHECK(cudaMemcpyAsync(to, back, length, cudaMemcpyHostToDevice, one));
        CHECK(cudaMemcpyAsync(host, to, length, cudaMemcpyDeviceToHost, one));
        CHECK(cudaEventRecord(event, one));
        CHECK(cudaStreamWaitEvent(two, event, 0));
        for (int round = 0; round < (count == most ? 16 : 2); round++)
            CHECK(cudaMemcpyAsync(from, host, length, cudaMemcpyHostToDevice, two));
        CHECK(cudaMemcpyAsync(from, back, sizeof(int), cudaMemcpyHostToDevice, two));
        CHECK(cudaMemcpyAsync(second, from, length, cudaMemcpyDeviceToHost, two));
        go = 1;
        CHECK(cudaStreamSynchronize(two));
        expect(second, count, first);
        expect(host, count, first);
        // Written by a host function ordered after an event of the copying stream.
        first += 1000;
        Look look = {back, count, first, 0};
        fill<<<64, 256, 0, two>>>(from, count, first);
        std::memset(back, 0xff, length);
        CHECK(cudaMemcpyAsync(back, from, length, cudaMemcpyDeviceToHost, two));
        CHECK(cudaEventRecord(event, two));
        CHECK(cudaStreamWaitEvent(one, event, 0));
        CHECK(cudaLaunchHostFunc(one, look_at, &look));
        CHECK(cudaStreamSynchronize(one));
        EXPECT(look.right);
        // The program may change memory that a synchronous copy has read.
        for (int round = 0; round < 4; round++) {
            first += 1000;
            write(&(work[0] = {host, count, first}));
            CHECK(cudaMemcpy(to, host, length, cudaMemcpyHostToDevice));
            std::memset(host, 0xff, length);
            result(one);
        }
    }
    std::printf("hostOrder: pinned memory right\n");

    const int count = 100000;
    const size_t length = count * sizeof(int);
    int *mapped, *seen;
    CHECK(cudaHostAlloc(&mapped, length, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&seen, mapped, 0));
    fill<<<64, 256, 0, one>>>(seen, count, 5);
    CHECK(cudaMemcpyAsync(to, mapped, length, cudaMemcpyHostToDevice, one));
    CHECK(cudaMemcpyAsync(back, to, length, cudaMemcpyDeviceToHost, one));
    CHECK(cudaStreamSynchronize(one));
    expect(back, count, 5);
    expect(mapped, count, 5);
    fill<<<64, 256, 0, one>>>(from, count, 70);
    CHECK(cudaMemcpyAsync(mapped, from, length, cudaMemcpyDeviceToHost, one));
    add<<<64, 256, 0, one>>>(seen, count, 7);
    CHECK(cudaStreamSynchronize(one));
    expect(mapped, count, 77);
    // A synchronous copy has read mapped memory when it returns; a synchronous copy of other memory
    // contains the changes of earlier kernels.
    for (int round = 0; round < 4; round++) {
        fill<<<64, 256>>>(seen, count, round);
        CHECK(cudaMemcpy(to, mapped, length, cudaMemcpyHostToDevice));
        std::memset(mapped, 0xff, length);
        add<<<1, 1>>>(from, 1, 1);
        CHECK(cudaMemcpy(back, to, length, cudaMemcpyDeviceToHost));
        expect(back, count, round);
        fill<<<64, 256>>>(seen, count, round + 10);
        CHECK(cudaMemcpy(back, to, length, cudaMemcpyDeviceToHost));
        expect(mapped, count, round + 10);
    }
    std::printf("hostOrder: mapped memory right\n");

    // Ordered by the default stream, between two blocking streams.
    cudaStream_t first_blocking, second_blocking;
    CHECK(cudaStreamCreate(&first_blocking));
    CHECK(cudaStreamCreate(&second_blocking));
    for (int round = 0; round < 4; round++) {
        std::memset(host, 0xff, bytes);
        fill<<<64, 256, 0, first_blocking>>>(from, most, round);
        CHECK(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, first_blocking));
        add<<<1, 1>>>(to, 1, 1);
        add<<<1, 1, 0, second_blocking>>>(to, 1, 1);
        CHECK(cudaStreamSynchronize(second_blocking));
        expect(host, most, round);
    }
    std::printf("hostOrder: the default stream's order right\n");

    // Graphs' functions on two streams, one of them behind a copy that follows a third stream's
    // function: no function waits for the copy that another one precedes.
    cudaStream_t three;
    CHECK(cudaStreamCreateWithFlags(&three, cudaStreamNonBlocking));
    Look found = {back, most, 0, 0}, nowhere = {back, 0, 0, 0};
    cudaGraphExec_t looks[2];
    Look *targets[2] = {&nowhere, &found};
    for (int i = 0; i < 2; i++) {
        cudaGraph_t graph;
        CHECK(cudaStreamBeginCapture(one, cudaStreamCaptureModeThreadLocal));
        CHECK(cudaLaunchHostFunc(one, look_at, targets[i]));
        CHECK(cudaStreamEndCapture(one, &graph));
        CHECK(cudaGraphInstantiate(&looks[i], graph, 0));
        CHECK(cudaGraphDestroy(graph));
    }
    for (int round = 0; round < 20; round++) {
        found.first = 100 * round;
        found.right = 0;
        std::atomic<int> go(0);
        fill<<<64, 256, 0, one>>>(from, most, found.first);
        CHECK(cudaLaunchHostFunc(one, wait_for, &go));
        CHECK(cudaEventRecord(event, one));
        CHECK(cudaGraphLaunch(looks[0], one));
        CHECK(cudaStreamWaitEvent(three, event, 0));
        CHECK(cudaLaunchHostFunc(three, look_at, &nowhere));
        CHECK(cudaEventRecord(event, three));
        CHECK(cudaStreamWaitEvent(two, event, 0));
        CHECK(cudaMemcpyAsync(back, from, bytes, cudaMemcpyDeviceToHost, two));
        CHECK(cudaGraphLaunch(looks[1], two));
        go = 1;
        CHECK(cudaStreamSynchronize(two));
        CHECK(cudaStreamSynchronize(one));
        if (!found.right) return std::printf("FAILED: round %d: a graph's function ran before a copy\n", round), 1;
    }
    std::printf("hostOrder: graphs' functions behind copies right\n");

    int *managed;
    CHECK(cudaMallocManaged(&managed, length));
    fill<<<64, 256>>>(managed, count, 9);
    CHECK(cudaMemcpy(to, managed, length, cudaMemcpyDefault));
    CHECK(cudaMemcpy(back, to, length, cudaMemcpyDeviceToHost));
    expect(back, count, 9);
    fill<<<64, 256>>>(managed, count, 11);
    CHECK(cudaMemcpy(back, managed, length, cudaMemcpyDefault));
    expect(back, count, 11);
    fill<<<64, 256>>>(to, count, 13);
    CHECK(cudaMemcpy(managed, to, length, cudaMemcpyDefault));
    add<<<64, 256>>>(managed, count, 2);
    CHECK(cudaDeviceSynchronize());
    expect(managed, count, 15);
    int *zeros;
    CHECK(cudaMalloc(&zeros, length));
    CHECK(cudaMemset(zeros, 0, length));
    std::memset(managed, 0, length);
    add<<<64, 256>>>(managed, count, 11);
    CHECK(cudaMemcpy(managed, zeros, length, cudaMemcpyDeviceToDevice));
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < count; i++) EXPECT(managed[i] == 0);
    // The host sees its copy to one half at once; the kernel's values in the other half stay.
    Work seventeen = {back, count, 17};
    write(&seventeen);
    fill<<<64, 256>>>(managed, count, 3);
    CHECK(cudaMemcpy(managed, back, length / 2, cudaMemcpyHostToDevice));
    CHECK(cudaStreamSynchronize(nullptr));
    expect(managed, count / 2, 17);
    managed[0] = 16;
    add<<<64, 256>>>(managed, 1, 1);
    CHECK(cudaDeviceSynchronize());
    expect(managed, count / 2, 17);
    for (int i = count / 2; i < count; i++) EXPECT(managed[i] == 3 + i);
    std::printf("hostOrder: managed memory right\n");
    return 0;
}

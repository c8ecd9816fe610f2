// Flags in mapped memory between a program and a kernel that runs: neither sees a flag before the
// data that it announces.
#include "check.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

const int DATA = 65536, REPLY = 4096, ROUNDS = 30;

// The flags lie below the data. Each has a line of its own.
struct Flags {
    alignas(64) volatile unsigned asked;
    alignas(64) volatile unsigned answered;
    alignas(64) volatile unsigned wrong;
};

// Answers one flag after the other, which grow by `step`; counts words of the data that are not
// those of the flag.
__global__ void answer(Flags *flags, volatile unsigned *data, volatile unsigned *reply, unsigned rounds, unsigned step) {
    for (unsigned round = 1; round <= rounds; round++) {
        while (flags->asked != round * step) {
        }
        __threadfence_system();
        for (int i = 0; i < DATA; i += 257)
            if (data[i] != round * 1000003u) flags->wrong = flags->wrong + 1;
        for (int i = 0; i < REPLY; i++) reply[i] = round * 1000003u;
        __threadfence_system();
        flags->answered = round * step;
    }
}

struct Exchange {
    Flags *flags;
    unsigned *data, *reply;
    cudaStream_t stream;
    unsigned step;

    explicit Exchange(unsigned rounds, unsigned step = 1) : step(step) {
        CHECK(cudaHostAlloc(&flags, sizeof *flags, cudaHostAllocMapped));
        CHECK(cudaHostAlloc(&data, DATA * sizeof *data, cudaHostAllocMapped));
        CHECK(cudaHostAlloc(&reply, REPLY * sizeof *reply, cudaHostAllocMapped));
        flags->asked = flags->answered = flags->wrong = 0;
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        answer<<<1, 1, 0, stream>>>(flags, data, reply, rounds, step);
        CHECK(cudaGetLastError());
    }
    ~Exchange() {
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaStreamDestroy(stream));
        CHECK(cudaFreeHost(flags));
        CHECK(cudaFreeHost(data));
        CHECK(cudaFreeHost(reply));
    }
    void ask(unsigned round) {
        for (int i = 0; i < DATA; i++) data[i] = round * 1000003u;
        std::atomic_thread_fence(std::memory_order_seq_cst);
        flags->asked = round * step;
    }
    void check(unsigned round) {
        while (flags->answered != round * step) {
        }
        std::atomic_thread_fence(std::memory_order_seq_cst);
        for (int i = 0; i < REPLY; i++) EXPECT(static_cast<volatile unsigned *>(reply)[i] == round * 1000003u);
        EXPECT(flags->wrong == 0);
    }
};

// One thread calls, and changes travel meanwhile; another one only watches.
static void watched(unsigned *word) {
    Exchange exchange(ROUNDS);
    cudaStream_t other;
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    std::atomic<unsigned> answered{0};
    std::thread watcher([&] {
        for (unsigned round = 1; round <= ROUNDS; round++) {
            exchange.check(round);
            answered = round;
        }
    });
    for (unsigned round = 1; round <= ROUNDS; round++) {
        exchange.ask(round);
        while (answered != round) {
            unsigned value;
            CHECK(cudaMemcpyAsync(&value, word, sizeof value, cudaMemcpyDeviceToHost, other));
            CHECK(cudaStreamSynchronize(other));
        }
    }
    watcher.join();
    CHECK(cudaStreamDestroy(other));
    std::printf("flags: %d rounds, no flag before its data\n", ROUNDS);
}

// A thread waits for the kernel, which waits for another thread.
template <typename Wait> static void awaited(const char *name, Wait wait) {
    Exchange exchange(1);
    std::thread waiter([&] {
        CHECK(wait(exchange.stream));
        exchange.check(1);
    });
    // The other thread waits by then; nothing shows when its wait begins.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    exchange.ask(1);
    waiter.join();
    std::printf("flags: a thread in %s does not hold a flag back\n", name);
}

// A thread waits for the kernel, and another one exchanges flags with it, as NCCL's threads do.
static void unattended(unsigned step) {
    Exchange exchange(ROUNDS, step);
    std::thread waiter([&] { CHECK(cudaStreamSynchronize(exchange.stream)); });
    for (unsigned round = 1; round <= ROUNDS; round++) {
        exchange.ask(round);
        exchange.check(round);
    }
    waiter.join();
    std::printf("flags: %d rounds beside a wait, flags grow by %u\n", ROUNDS, step);
}

// The program makes no call while it exchanges flags with the kernel.
static void watched_only() {
    Exchange exchange(ROUNDS);
    for (unsigned round = 1; round <= ROUNDS; round++) {
        exchange.ask(round);
        exchange.check(round);
    }
    std::printf("flags: %d rounds without a call\n", ROUNDS);
}

int main() {
    // Natively it is always so.
    setenv("GPUSESSION_WATCHED_MEMORY", "on", 1);
    unsigned *word;
    CHECK(cudaMalloc(&word, sizeof *word));
    // Loaded before it waits for anything.
    {
        Exchange first(0);
    }
    watched(word);
    awaited("cudaStreamSynchronize", [](cudaStream_t stream) { return cudaStreamSynchronize(stream); });
    awaited("cudaDeviceSynchronize", [](cudaStream_t) { return cudaDeviceSynchronize(); });
    awaited("cudaEventSynchronize", [](cudaStream_t stream) {
        cudaEvent_t event;
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        CHECK(cudaEventRecord(event, stream));
        CHECK(cudaEventSynchronize(event));
        return cudaEventDestroy(event);
    });
    for (unsigned step : {1, 2, 8}) unattended(step);
    watched_only();
    CHECK(cudaFree(word));
    return 0;
}

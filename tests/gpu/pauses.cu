// Measures calls that wait: a copy of 4 bytes to the program, and four launches with a
// synchronization after pauses of the program. Prints the median of each as a JSON line.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

using Clock = std::chrono::steady_clock;

static double microseconds_since(Clock::time_point start) {
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

static void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "pauses: %s\n", cudaGetErrorString(error));
    std::exit(1);
}

// Runs the work after pauses in which the program computes.
template <typename Work>
static void measure(const std::string &name, int pause, int repeat, Work work) {
    std::vector<double> taken;
    for (int i = 0; i < repeat; i++) {
        for (auto start = Clock::now(); microseconds_since(start) < pause;) {
        }
        auto start = Clock::now();
        work();
        taken.push_back(microseconds_since(start));
    }
    std::nth_element(taken.begin(), taken.begin() + repeat / 2, taken.end());
    std::printf("{\"name\": \"%s\", \"value\": %.2f, \"unit\": \"us\"}\n", name.c_str(), taken[repeat / 2]);
}

__global__ void spin(unsigned nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}

int main() {
    int *memory = nullptr, value = 0;
    check(cudaMalloc(&memory, sizeof value));
    check(cudaMemset(memory, 0, sizeof value));
    spin<<<1, 1>>>(0);
    check(cudaDeviceSynchronize());
    measure("copy_4B", 0, 2000, [&] { check(cudaMemcpy(&value, memory, sizeof value, cudaMemcpyDeviceToHost)); });
    for (unsigned work : {0, 100}) {
        for (int pause : {0, 150, 1000}) {
            auto name = "launches_of_" + std::to_string(work) + "us_after_" + std::to_string(pause) + "us";
            measure(name, pause, 300, [&] {
                for (int i = 0; i < 4; i++) spin<<<1, 1>>>(work * 1000 / 4);
                check(cudaDeviceSynchronize());
            });
        }
    }
    return 0;
}

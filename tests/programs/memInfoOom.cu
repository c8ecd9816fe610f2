// Asks for more memory than the device has, gets an error, and continues normally.
#include "check.h"

#include <vector>

__global__ void set(int *values, int value) { values[threadIdx.x] = value; }

int main() {
    size_t free_before = 0, total = 0, free_with = 0;
    CHECK(cudaMemGetInfo(&free_before, &total));
    EXPECT(total >= 64u << 20);
    EXPECT(free_before <= total);
    void *memory = nullptr;
    SHOW(cudaMalloc(&memory, total * 2));
    EXPECT(memory == nullptr);
    SHOW(cudaGetLastError());
    SHOW(cudaGetLastError());
    SHOW(cudaMalloc(&memory, total + 1));
    SHOW(cudaMalloc(&memory, size_t(1) << 60));
    SHOW(cudaMalloc(&memory, size_t(-1)));
    SHOW(cudaGetLastError());
    SHOW(cudaMalloc(&memory, 0));
    EXPECT(memory == nullptr);

    // Other programs on the same GPU come and go: one of three tries has to see the program's own
    // allocation.
    const size_t block = 32u << 20;
    bool seen = false;
    for (int attempt = 0; attempt < 3 && !seen; attempt++) {
        CHECK(cudaMemGetInfo(&free_before, &total));
        int *values;
        CHECK(cudaMalloc(&values, block));
        set<<<1, 32>>>(values, attempt);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemGetInfo(&free_with, &total));
        CHECK(cudaFree(values));
        seen = free_with + block <= free_before;
    }
    EXPECT(seen);

    // Allocates in pieces up to the end: 1/8 of the total at a time, so that at most eight fit.
    std::vector<void *> pieces;
    cudaError_t status = cudaSuccess;
    while (pieces.size() < 16) {
        void *piece = nullptr;
        status = cudaMalloc(&piece, total / 8);
        if (status != cudaSuccess) break;
        pieces.push_back(piece);
    }
    std::printf("in pieces -> %s, at most eight fit: %s\n", cudaGetErrorName(status), pieces.size() <= 8 ? "yes" : "no");
    cudaGetLastError();
    for (void *piece : pieces) CHECK(cudaFree(piece));

    int host[32] = {}, *values;
    CHECK(cudaMalloc(&values, sizeof host));
    set<<<1, 32>>>(values, 11);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(host, values, sizeof host, cudaMemcpyDeviceToHost));
    for (int value : host) EXPECT(value == 11);
    CHECK(cudaFree(values));
    std::printf("memInfoOom: continued\n");
    return 0;
}

// Matrix product with tiles in shared memory, for sizes that are not multiples of the tile. The
// elements are small integers, so the result is exact, and equal to the host's bit for bit.
#include "check.h"

#include <vector>

const int TILE = 16;

__global__ void multiply(const float *a, const float *b, float *c, int rows, int inner, int columns) {
    __shared__ float tile_a[TILE][TILE];
    __shared__ float tile_b[TILE][TILE + 1];
    int row = blockIdx.y * TILE + threadIdx.y;
    int column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int start = 0; start < inner; start += TILE) {
        int k_a = start + threadIdx.x;
        int k_b = start + threadIdx.y;
        tile_a[threadIdx.y][threadIdx.x] = row < rows && k_a < inner ? a[row * inner + k_a] : 0.0f;
        tile_b[threadIdx.y][threadIdx.x] = k_b < inner && column < columns ? b[k_b * columns + column] : 0.0f;
        __syncthreads();
        for (int k = 0; k < TILE; k++) sum += tile_a[threadIdx.y][k] * tile_b[k][threadIdx.x];
        __syncthreads();
    }
    if (row < rows && column < columns) c[row * columns + column] = sum;
}

static void run(int rows, int inner, int columns) {
    std::vector<float> a(rows * inner), b(inner * columns), c(rows * columns), expected(rows * columns, 0.0f);
    Numbers numbers(rows + inner + columns);
    for (float &x : a) x = float(int(numbers.next() % 9) - 4);
    for (float &x : b) x = float(int(numbers.next() % 9) - 4);
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < inner; k++)
            for (int j = 0; j < columns; j++) expected[i * columns + j] += a[i * inner + k] * b[k * columns + j];
    float *device_a, *device_b, *device_c;
    CHECK(cudaMalloc(&device_a, a.size() * sizeof(float)));
    CHECK(cudaMalloc(&device_b, b.size() * sizeof(float)));
    CHECK(cudaMalloc(&device_c, c.size() * sizeof(float)));
    CHECK(cudaMemcpy(device_a, a.data(), a.size() * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(device_b, b.data(), b.size() * sizeof(float), cudaMemcpyHostToDevice));
    dim3 threads(TILE, TILE);
    dim3 blocks((columns + TILE - 1) / TILE, (rows + TILE - 1) / TILE);
    multiply<<<blocks, threads>>>(device_a, device_b, device_c, rows, inner, columns);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(c.data(), device_c, c.size() * sizeof(float), cudaMemcpyDeviceToHost));
    double trace = 0;
    for (size_t i = 0; i < c.size(); i++) {
        EXPECT(c[i] == expected[i]);
        trace += c[i] * double(i % 7);
    }
    CHECK(cudaFree(device_a));
    CHECK(cudaFree(device_b));
    CHECK(cudaFree(device_c));
    std::printf("matrixMul: %dx%d by %dx%d right, checksum %.0f\n", rows, inner, inner, columns, trace);
}

int main() {
    run(16, 16, 16);
    run(1, 33, 1);
    run(100, 70, 50);
    run(160, 128, 96);
    return 0;
}

// __constant__ and __device__ variables: copies from and to the whole and to parts, addresses and
// sizes, and a __device__ variable that kernels change.
#include "check.h"

__constant__ float coefficients[16] = {1, 2, 3};
__constant__ int offset_value = 40;
__device__ int counter = 100;
__device__ double table[8] = {0.5, 1.5};
__device__ unsigned long long untouched[4];

struct Settings {
    int first;
    float second;
    double third;
    char text[12];
};
__constant__ Settings settings = {7, 0.25f, 1e10, "constant"};

__global__ void use(float *out) {
    int i = threadIdx.x;
    out[i] = coefficients[i] * 10.0f + float(offset_value);
    atomicAdd(&counter, 1);
    if (i < 8) table[i] += double(i);
    if (i < 4) untouched[i] += 5;
    if (i == 0) out[16] = float(settings.first) + settings.second + float(settings.third / 1e10) + float(settings.text[0]);
}

int main() {
    float out[17], values[16], *device_out;
    CHECK(cudaMalloc(&device_out, sizeof out));
    // The initial values of the program file.
    use<<<1, 16>>>(device_out);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(out, device_out, sizeof out, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 16; i++) EXPECT(out[i] == (i < 3 ? float(i + 1) : 0.0f) * 10.0f + 40.0f);
    EXPECT(out[16] == 7.0f + 0.25f + 1.0f + float('c'));

    // Changes the whole, a part, and asynchronously.
    for (int i = 0; i < 16; i++) values[i] = float(i) * 0.5f;
    CHECK(cudaMemcpyToSymbol(coefficients, values, sizeof values));
    float one = 64.0f;
    CHECK(cudaMemcpyToSymbol(coefficients, &one, sizeof one, 5 * sizeof(float)));
    int new_offset = -3;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMemcpyToSymbolAsync(offset_value, &new_offset, sizeof new_offset, 0, cudaMemcpyHostToDevice, stream));
    use<<<1, 16, 0, stream>>>(device_out);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpyAsync(out, device_out, sizeof out, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < 16; i++) EXPECT(out[i] == (i == 5 ? 64.0f : float(i) * 0.5f) * 10.0f - 3.0f);

    int count = 0;
    CHECK(cudaMemcpyFromSymbol(&count, counter, sizeof count));
    EXPECT(count == 132);
    double doubles[8];
    CHECK(cudaMemcpyFromSymbol(doubles, table, sizeof doubles));
    for (int i = 0; i < 8; i++) EXPECT(doubles[i] == (i < 2 ? i + 0.5 : 0.0) + 2.0 * i);
    double third = 0;
    CHECK(cudaMemcpyFromSymbol(&third, table, sizeof third, 3 * sizeof(double)));
    EXPECT(third == 6.0);
    unsigned long long zeros[4];
    CHECK(cudaMemcpyFromSymbol(zeros, untouched, sizeof zeros));
    for (unsigned long long zero : zeros) EXPECT(zero == 10);

    void *address = nullptr;
    size_t size = 0;
    CHECK(cudaGetSymbolAddress(&address, counter));
    CHECK(cudaGetSymbolSize(&size, coefficients));
    EXPECT(size == sizeof values);
    CHECK(cudaGetSymbolSize(&size, settings));
    EXPECT(size == sizeof(Settings));
    CHECK(cudaMemset(address, 0, sizeof(int)));
    CHECK(cudaMemcpyFromSymbol(&count, counter, sizeof count));
    EXPECT(count == 0);
    static int no_symbol;
    SHOW(cudaGetSymbolAddress(&address, no_symbol));
    cudaGetLastError();
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device_out));
    std::printf("constantGlobal: constants and variables right\n");
    return 0;
}

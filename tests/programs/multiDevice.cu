// Every device on its own, then copies from each to the next.
#include "check.h"

#include <vector>

__global__ void fill(int *values, int count, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = value + i;
}

int main() {
    const int count = 100000;
    const size_t bytes = count * sizeof(int);
    int devices = 0;
    CHECK(cudaGetDeviceCount(&devices));
    std::vector<int *> memory(devices);
    std::vector<cudaStream_t> stream(devices);
    std::vector<int> host(count);
    for (int device = 0; device < devices; device++) {
        CHECK(cudaSetDevice(device));
        int current = -1;
        CHECK(cudaGetDevice(&current));
        EXPECT(current == device);
        CHECK(cudaMalloc(&memory[device], bytes));
        CHECK(cudaStreamCreateWithFlags(&stream[device], cudaStreamNonBlocking));
        fill<<<(count + 255) / 256, 256, 0, stream[device]>>>(memory[device], count, device * 1000);
        CHECK(cudaGetLastError());
    }
    for (int device = 0; device < devices; device++) {
        CHECK(cudaSetDevice(device));
        CHECK(cudaStreamSynchronize(stream[device]));
        CHECK(cudaMemcpy(host.data(), memory[device], bytes, cudaMemcpyDeviceToHost));
        for (int i = 0; i < count; i++) EXPECT(host[i] == device * 1000 + i);
        cudaPointerAttributes attributes;
        CHECK(cudaPointerGetAttributes(&attributes, memory[device]));
        EXPECT(attributes.device == device);
    }
    for (int device = 0; device + 1 < devices; device++) {
        CHECK(cudaMemcpyPeer(memory[device + 1], device + 1, memory[device], device, bytes));
        for (int side : {device, device + 1}) {
            CHECK(cudaSetDevice(side));
            CHECK(cudaDeviceSynchronize());
        }
        CHECK(cudaMemcpy(host.data(), memory[device + 1], bytes, cudaMemcpyDeviceToHost));
        for (int i = 0; i < count; i++) EXPECT(host[i] == i);
        int access = -1;
        CHECK(cudaDeviceCanAccessPeer(&access, device, device + 1));
        EXPECT(access == 0 || access == 1);
    }
    for (int device = 0; device < devices; device++) {
        CHECK(cudaSetDevice(device));
        CHECK(cudaStreamDestroy(stream[device]));
        CHECK(cudaFree(memory[device]));
    }
    std::printf("multiDevice: %d device(s) right\n", devices);
    return 0;
}

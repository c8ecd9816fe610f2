// Uses every device on its own, then streams of a device that is not current, then copies from each
// device to the next. Finally kernels read the next device's memory, if the machine supports it.
#include "check.h"

#include <vector>

__global__ void fill(int *values, int count, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = value + i;
}

__global__ void add(int *sum, const int *there, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) sum[i] += there[i];
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
    // A copy that is not asynchronous is in order with the default streams of both devices, and so
    // with streams that follow these.
    for (int device = 0; device + 1 < devices; device++) {
        const int next = device + 1, current = device == 0 ? next : device;
        cudaStream_t before, behind;
        CHECK(cudaSetDevice(device));
        CHECK(cudaStreamCreate(&before));
        CHECK(cudaSetDevice(next));
        CHECK(cudaStreamCreate(&behind));
        for (int round = 1; round <= 4; round++) {
            CHECK(cudaSetDevice(device));
            for (int i = 0; i < 20; i++) fill<<<(count + 255) / 256, 256, 0, before>>>(memory[device], count, i * round);
            CHECK(cudaSetDevice(current));
            if (round % 2) {
                CHECK(cudaMemcpyPeer(memory[next], next, memory[device], device, bytes));
            } else {
                CHECK(cudaMemcpy(memory[next], memory[device], bytes, cudaMemcpyDeviceToDevice));
            }
            CHECK(cudaSetDevice(next));
            add<<<(count + 255) / 256, 256, 0, behind>>>(memory[next], memory[next], count);
            CHECK(cudaStreamSynchronize(behind));
            CHECK(cudaMemcpy(host.data(), memory[next], bytes, cudaMemcpyDeviceToHost));
            for (int i = 0; i < count; i++) EXPECT(host[i] == 2 * (19 * round + i));
        }
        CHECK(cudaStreamDestroy(behind));
        CHECK(cudaSetDevice(device));
        CHECK(cudaStreamDestroy(before));
    }
    // Orders two devices' streams by an event: the copy waits for the kernel, and the next kernel
    // for the copy.
    for (int device = 0; device + 1 < devices; device++) {
        const int next = device + 1;
        CHECK(cudaSetDevice(device));
        cudaEvent_t filled;
        CHECK(cudaEventCreateWithFlags(&filled, cudaEventDisableTiming));
        fill<<<(count + 255) / 256, 256, 0, stream[device]>>>(memory[device], count, 7);
        CHECK(cudaEventRecord(filled, stream[device]));
        CHECK(cudaSetDevice(next));
        CHECK(cudaStreamWaitEvent(stream[next], filled, 0));
        CHECK(cudaMemcpyPeerAsync(memory[next], next, memory[device], device, bytes, stream[next]));
        add<<<(count + 255) / 256, 256, 0, stream[next]>>>(memory[next], memory[next], count);
        CHECK(cudaStreamSynchronize(stream[next]));
        CHECK(cudaMemcpy(host.data(), memory[next], bytes, cudaMemcpyDeviceToHost));
        for (int i = 0; i < count; i++) EXPECT(host[i] == 2 * (7 + i));
        int access = 0;
        CHECK(cudaDeviceCanAccessPeer(&access, next, device));
        if (access) {
            CHECK(cudaDeviceEnablePeerAccess(device, 0));
            EXPECT(cudaDeviceEnablePeerAccess(device, 0) == cudaErrorPeerAccessAlreadyEnabled);
            cudaGetLastError();
            add<<<(count + 255) / 256, 256, 0, stream[next]>>>(memory[next], memory[device], count);
            CHECK(cudaGetLastError());
            CHECK(cudaStreamSynchronize(stream[next]));
            // Works whichever device is current.
            CHECK(cudaSetDevice(device));
            CHECK(cudaMemcpy(host.data(), memory[next], bytes, cudaMemcpyDeviceToHost));
            for (int i = 0; i < count; i++) EXPECT(host[i] == 3 * (7 + i));
            CHECK(cudaSetDevice(next));
            CHECK(cudaDeviceDisablePeerAccess(device));
        } else {
            EXPECT(cudaDeviceEnablePeerAccess(device, 0) == cudaErrorPeerAccessUnsupported);
            cudaGetLastError();
        }
        CHECK(cudaEventDestroy(filled));
    }
    // Copies on a stream of a device that is not current: small, large and in rows, both ways.
    for (int device = 0; device < devices; device++) {
        CHECK(cudaSetDevice((device + 1) % devices));
        int *pinned;
        CHECK(cudaHostAlloc(&pinned, bytes, cudaHostAllocPortable));
        for (int length : {1, count}) {
            const size_t size = length * sizeof(int);
            for (bool rows : {false, true}) {
                for (int i = 0; i < length; i++) pinned[i] = 5 * i + device + rows;
                if (rows) {
                    CHECK(cudaMemcpy2DAsync(memory[device], size, pinned, size, size, 1, cudaMemcpyHostToDevice, stream[device]));
                } else {
                    CHECK(cudaMemcpyAsync(memory[device], pinned, size, cudaMemcpyHostToDevice, stream[device]));
                }
                CHECK(cudaStreamSynchronize(stream[device]));
                for (int i = 0; i < length; i++) pinned[i] = 0;
                if (rows) {
                    CHECK(cudaMemcpy2DAsync(pinned, size, memory[device], size, size, 1, cudaMemcpyDeviceToHost, stream[device]));
                } else {
                    CHECK(cudaMemcpyAsync(pinned, memory[device], size, cudaMemcpyDeviceToHost, stream[device]));
                }
                CHECK(cudaStreamSynchronize(stream[device]));
                for (int i = 0; i < length; i++) EXPECT(pinned[i] == 5 * i + device + rows);
            }
        }
        CHECK(cudaFreeHost(pinned));
    }
    // A host function on one device's default stream does not order another device's copies.
    if (devices > 1) {
        int *pinned, *other, *values;
        CHECK(cudaHostAlloc(&pinned, 64 * sizeof(int), cudaHostAllocPortable));
        CHECK(cudaHostAlloc(&other, sizeof(int), cudaHostAllocPortable));
        for (int round = 0; round < 20; round++) {
            CHECK(cudaSetDevice(1));
            CHECK(cudaMalloc(&values, count * sizeof(int)));
            for (int i = 0; i < 20; i++) fill<<<1, 64>>>(values, count, round);
            for (int i = 0; i < 64; i++) {
                pinned[i] = -1;
                CHECK(cudaMemcpyAsync(pinned + i, values + i, sizeof(int), cudaMemcpyDeviceToHost, nullptr));
            }
            CHECK(cudaSetDevice(0));
            CHECK(cudaLaunchHostFunc(nullptr, [](void *seen) { *static_cast<int *>(seen) = 1; }, other));
            CHECK(cudaStreamSynchronize(nullptr));
            CHECK(cudaSetDevice(1));
            CHECK(cudaStreamSynchronize(nullptr));
            for (int i = 0; i < 64; i++) EXPECT(pinned[i] == round + i);
            CHECK(cudaFree(values));
        }
        CHECK(cudaFreeHost(pinned));
        CHECK(cudaFreeHost(other));
    }
    for (int device = 0; device < devices; device++) {
        CHECK(cudaSetDevice(device));
        int *large;
        CHECK(cudaMalloc(&large, 64 << 20));
        for (int i = 0; i < 10; i++) fill<<<(count + 255) / 256, 256, 0, stream[device]>>>(large, count, i);
        // Freeing waits for the memory's device, even while another device is current.
        CHECK(cudaSetDevice((device + 1) % devices));
        CHECK(cudaFree(large));
        CHECK(cudaFree(memory[device]));
        CHECK(cudaSetDevice(device));
        CHECK(cudaStreamSynchronize(stream[device]));
        CHECK(cudaStreamDestroy(stream[device]));
    }
    std::printf("multiDevice: %d device(s) right\n", devices);
    return 0;
}

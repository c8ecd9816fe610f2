// Prints those properties of each device that do not depend on the machine.
#include "check.h"

int main() {
    int devices = 0, driver = 0, runtime = 0;
    CHECK(cudaGetDeviceCount(&devices));
    CHECK(cudaDriverGetVersion(&driver));
    CHECK(cudaRuntimeGetVersion(&runtime));
    EXPECT(driver / 1000 >= runtime / 1000);
    EXPECT(runtime == CUDART_VERSION);
    std::printf("deviceQuery: %d device(s), driver %d\n", devices, driver);
    EXPECT(devices > 0);
    for (int device = 0; device < devices; device++) {
        cudaDeviceProp p;
        CHECK(cudaGetDeviceProperties(&p, device));
        std::printf("device %d: %s\n", device, p.name);
        std::printf("  compute capability %d.%d, %d multiprocessors, warp %d\n", p.major, p.minor, p.multiProcessorCount,
                    p.warpSize);
        std::printf("  memory %zu MiB, L2 %d KiB, bus %d bit\n", p.totalGlobalMem >> 20, p.l2CacheSize >> 10,
                    p.memoryBusWidth);
        std::printf("  threads: %d per block, %d per multiprocessor; block %d x %d x %d; grid %d x %d x %d\n",
                    p.maxThreadsPerBlock, p.maxThreadsPerMultiProcessor, p.maxThreadsDim[0], p.maxThreadsDim[1],
                    p.maxThreadsDim[2], p.maxGridSize[0], p.maxGridSize[1], p.maxGridSize[2]);
        std::printf("  shared memory: %zu per block, %zu with opt-in, %zu per multiprocessor; registers %d\n",
                    p.sharedMemPerBlock, p.sharedMemPerBlockOptin, p.sharedMemPerMultiprocessor, p.regsPerBlock);
        std::printf("  constant memory %zu, copy engines %d, unified addressing %d, concurrent kernels %d\n",
                    p.totalConstMem, p.asyncEngineCount, p.unifiedAddressing, p.concurrentKernels);
        int cooperative, pools, priorities;
        CHECK(cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device));
        CHECK(cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, device));
        CHECK(cudaDeviceGetAttribute(&priorities, cudaDevAttrStreamPrioritiesSupported, device));
        std::printf("  cooperative launch %d, memory pools %d, stream priorities %d\n", cooperative, pools, priorities);
        // The bus address identifies the device.
        char address[32];
        int found = -1;
        CHECK(cudaDeviceGetPCIBusId(address, sizeof address, device));
        CHECK(cudaDeviceGetByPCIBusId(&found, address));
        EXPECT(found == device);
        size_t free = 0, total = 0;
        CHECK(cudaSetDevice(device));
        CHECK(cudaMemGetInfo(&free, &total));
        EXPECT(total <= p.totalGlobalMem && free <= total);
    }
    return 0;
}

// Forks before the first CUDA call, and uses CUDA in both processes. Then forks while CUDA is in
// use, and CUDA calls of the child are refused.
#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

__global__ void set(int *values, int value) { values[threadIdx.x] = value + threadIdx.x; }

static int use(int value) {
    int *memory, host[32] = {};
    CHECK(cudaMalloc(&memory, sizeof host));
    set<<<1, 32>>>(memory, value);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(host, memory, sizeof host, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 32; i++) EXPECT(host[i] == value + i);
    CHECK(cudaFree(memory));
    return 0;
}

// Runs a function in a child, and returns the child's exit status.
template <typename Function> static int in_child(Function function) {
    std::fflush(stdout);
    pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        int status = function();
        std::fflush(stdout);
        _exit(status);
    }
    int status = 0;
    EXPECT(waitpid(child, &status, 0) == child);
    EXPECT(WIFEXITED(status));
    return WEXITSTATUS(status);
}

int main() {
    for (int i = 0; i < 2; i++) EXPECT(in_child([i] { return use(i * 100); }) == 0);
    std::printf("forkBeforeInit: two children right\n");
    use(500);
    std::printf("forkBeforeInit: parent right\n");
    int refused = in_child([] {
        int *memory = nullptr;
        cudaError_t status = cudaMalloc(&memory, 64);
        std::printf("child after initialisation: cudaMalloc -> %s\n", cudaGetErrorName(status));
        return status == cudaErrorInitializationError ? 5 : 6;
    });
    EXPECT(refused == 5);
    use(700);
    std::printf("forkBeforeInit: parent right afterwards\n");
    return 0;
}

// A sum over GPUs that read each other's memory: a library for torch_custom_all_reduce.py.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

constexpr int RANKS = 8, BLOCKS = 16, THREADS = 256, ENTRIES = 1024;
constexpr size_t BYTES = 8 << 20;
constexpr unsigned long long LIMIT_NS = 5000000000ull;

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        cudaError_t check_status = (call);                                                                             \
        if (check_status != cudaSuccess) {                                                                             \
            std::printf("FAILED line %d: %s: %s\n", __LINE__, #call, cudaGetErrorName(check_status));                  \
            std::fflush(stdout);                                                                                       \
            std::_Exit(1);                                                                                             \
        }                                                                                                              \
    } while (0)

// Other ranks write `arrived`; only its own rank uses the rest.
struct Signals {
    unsigned arrived[2][BLOCKS][RANKS];
    unsigned round[BLOCKS];
    unsigned failed;
};

constexpr size_t DATA_OFFSET = (sizeof(Signals) + 255) / 256 * 256;

// Addresses of one sum's inputs, of each rank.
struct Inputs {
    const float *of[RANKS];
};

struct Places {
    Signals *of[RANKS];
};

struct State {
    int rank, count, used, registered;
    Places places;
    Inputs *table;
    const void *captured[ENTRIES];
};

static __device__ unsigned long long now() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// Tells one other rank's block, and waits for it; returns false after LIMIT_NS.
static __device__ bool meet(Places places, int phase, int rank, int other, unsigned round) {
    unsigned *theirs = &places.of[other]->arrived[phase][blockIdx.x][rank];
    unsigned *mine = &places.of[rank]->arrived[phase][blockIdx.x][other];
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(round) : "memory");
    unsigned long long end = now() + LIMIT_NS;
    for (;;) {
        unsigned seen;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
        if (int(seen - round) >= 0) return true;
        if (now() > end) return false;
    }
}

__global__ void sum_of_ranks(Places places, const Inputs *inputs, float *out, int numbers, int rank, int count) {
    Signals *own = places.of[rank];
    volatile unsigned *failed = &own->failed;
    // After one failure no later sum waits.
    if (*failed) return;
    unsigned round = own->round[blockIdx.x] + 1;
    bool met = true;
    if (int(threadIdx.x) < count) met = meet(places, 0, rank, int(threadIdx.x), round);
    if (!__syncthreads_and(met)) {
        if (threadIdx.x == 0) *failed = 1;
        return;
    }
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < numbers; i += gridDim.x * blockDim.x) {
        float sum = 0;
        for (int other = 0; other < count; ++other) sum += inputs->of[other][i];
        out[i] = sum;
    }
    // No rank changes its input before all have read it.
    __syncthreads();
    if (int(threadIdx.x) < count) met = meet(places, 1, rank, int(threadIdx.x), round);
    if (!__syncthreads_and(met)) {
        if (threadIdx.x == 0) *failed = 2;
        return;
    }
    if (threadIdx.x == 0) own->round[blockIdx.x] = round;
}

static char *base_of(const void *address) {
    static void *function = nullptr;
    if (!function) {
        cudaDriverEntryPointQueryResult result;
        CHECK(cudaGetDriverEntryPointByVersion("cuPointerGetAttribute", &function, 12000, cudaEnableDefault, &result));
    }
    CUdeviceptr base = 0;
    auto get = reinterpret_cast<CUresult (*)(void *, CUpointer_attribute, CUdeviceptr)>(function);
    CUresult status = get(&base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CUdeviceptr(address));
    if (status != CUDA_SUCCESS) {
        std::printf("FAILED: RANGE_START_ADDR: %d\n", int(status));
        std::fflush(stdout);
        std::_Exit(1);
    }
    return reinterpret_cast<char *>(base);
}

extern "C" {

State *create(int rank, int count) {
    CHECK(cudaSetDevice(rank));
    auto *state = new State{};
    state->rank = rank, state->count = count;
    CHECK(cudaMalloc(&state->places.of[rank], DATA_OFFSET + BYTES));
    CHECK(cudaMemset(state->places.of[rank], 0, DATA_OFFSET + BYTES));
    CHECK(cudaMalloc(&state->table, ENTRIES * sizeof(Inputs)));
    CHECK(cudaMemset(state->table, 0, ENTRIES * sizeof(Inputs)));
    CHECK(cudaDeviceSynchronize());
    return state;
}

// Writes the handle of the allocation that contains an address, and returns the offset in it.
size_t handle_of(const void *address, void *handle) {
    char *base = base_of(address);
    CHECK(cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t *>(handle), base));
    return size_t(static_cast<const char *>(address) - base);
}

void *open_handle(const void *handle) {
    void *opened;
    auto *bytes = static_cast<const cudaIpcMemHandle_t *>(handle);
    CHECK(cudaIpcOpenMemHandle(&opened, *bytes, cudaIpcMemLazyEnablePeerAccess));
    return opened;
}

void close_handle(void *opened) { CHECK(cudaIpcCloseMemHandle(opened)); }

void *own_buffer(State *state) { return state->places.of[state->rank]; }

void set_buffer(State *state, int other, void *buffer) { state->places.of[other] = static_cast<Signals *>(buffer); }

// Entry 0 of the table is for eager sums, which copy their input to the rank's own buffer.
void finish_buffers(State *state) {
    Inputs inputs = {};
    for (int other = 0; other < state->count; ++other)
        inputs.of[other] = reinterpret_cast<float *>(reinterpret_cast<char *>(state->places.of[other]) + DATA_OFFSET);
    CHECK(cudaMemcpy(state->table, &inputs, sizeof inputs, cudaMemcpyHostToDevice));
    state->used = state->registered = 1;
}

void all_reduce(State *state, const float *in, float *out, int numbers, cudaStream_t stream) {
    cudaStreamCaptureStatus capturing;
    CHECK(cudaStreamIsCapturing(stream, &capturing));
    int entry = 0;
    if (capturing == cudaStreamCaptureStatusActive) {
        if (state->used == ENTRIES) std::abort();
        entry = state->used++;
        state->captured[entry] = in;
    } else {
        if (size_t(numbers) * sizeof(float) > BYTES) std::abort();
        char *data = reinterpret_cast<char *>(state->places.of[state->rank]) + DATA_OFFSET;
        CHECK(cudaMemcpyAsync(data, in, size_t(numbers) * sizeof(float), cudaMemcpyDeviceToDevice, stream));
    }
    int blocks = (numbers + THREADS - 1) / THREADS;
    if (blocks > BLOCKS) blocks = BLOCKS;
    sum_of_ranks<<<blocks, THREADS, 0, stream>>>(
        state->places, state->table + entry, out, numbers, state->rank, state->count);
    CHECK(cudaGetLastError());
}

// The inputs that captures have used and that no table entry names yet.
int first_new(State *state) { return state->registered; }
int end_new(State *state) { return state->used; }
const void *captured_input(State *state, int entry) { return state->captured[entry]; }

void register_input(State *state, int entry, void *const *addresses) {
    Inputs inputs = {};
    for (int other = 0; other < state->count; ++other) inputs.of[other] = static_cast<const float *>(addresses[other]);
    CHECK(cudaMemcpy(state->table + entry, &inputs, sizeof inputs, cudaMemcpyHostToDevice));
    state->registered = entry + 1;
}

// Returns 0, or the number of the meeting that a rank waited for in vain.
unsigned failure(State *state) {
    unsigned failed;
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&failed, &state->places.of[state->rank]->failed, sizeof failed, cudaMemcpyDeviceToHost));
    return failed;
}

void destroy(State *state) {
    CHECK(cudaFree(state->table));
    CHECK(cudaFree(state->places.of[state->rank]));
    delete state;
}
}

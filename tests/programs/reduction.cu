// Sums and maxima by warp shuffles, votes and one atomic per block, for lengths near multiples of
// the warp and the block.
#include "check.h"

#include <vector>

const unsigned ALL = 0xffffffffu;

__inline__ __device__ int warp_sum(int value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(ALL, value, step);
    return value;
}

__inline__ __device__ float warp_max(float value) {
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(ALL, value, step));
    return value;
}

// Every thread of the block takes part in every shuffle, so that the lengths need not be multiples.
__global__ void reduce(const int *values, int count, int *sum, int *odd, float *block_max) {
    __shared__ int sums[32];
    __shared__ float maxima[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int mine = 0, mine_odd = 0;
    float high = -1e30f;
    int stride = gridDim.x * blockDim.x;
    int rounds = (count + stride - 1) / stride;
    for (int round = 0; round < rounds; round++) {
        int i = round * stride + blockIdx.x * blockDim.x + threadIdx.x;
        int value = i < count ? values[i] : 0;
        mine += value;
        if (i < count) high = fmaxf(high, float(value));
        unsigned votes = __ballot_sync(ALL, value & 1);
        if (lane == 0) mine_odd += __popc(votes);
    }
    mine = warp_sum(mine);
    high = warp_max(high);
    if (lane == 0) {
        sums[warp] = mine;
        maxima[warp] = high;
        if (mine_odd) atomicAdd(odd, mine_odd);
    }
    __syncthreads();
    if (warp == 0) {
        int warps = blockDim.x / 32;
        mine = warp_sum(lane < warps ? sums[lane] : 0);
        high = warp_max(lane < warps ? maxima[lane] : -1e30f);
        if (lane == 0) {
            atomicAdd(sum, mine);
            block_max[blockIdx.x] = high;
        }
    }
}

// Broadcasts with an index that differs per lane, and any/all votes.
__global__ void warp_votes(int *out) {
    int lane = threadIdx.x;
    int rotated = __shfl_sync(ALL, lane * 10, (lane + 5) % 32);
    int prefix = lane;
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(ALL, prefix, step);
        if (lane >= step) prefix += other;
    }
    int any = __any_sync(ALL, lane == 7), all = __all_sync(ALL, lane < 32), none = __all_sync(ALL, lane == 7);
    out[lane] = rotated + prefix * 1000 + any * 1000000 + all * 2000000 + none * 4000000;
}

int main() {
    const int sizes[] = {1, 31, 32, 33, 255, 1000, 4096, 65537, 1 << 19};
    for (int count : sizes) {
        const int blocks = 24, threads = 256;
        std::vector<int> values(count);
        Numbers numbers(count);
        int sum = 0, odd = 0;
        float high = -1e30f;
        for (int &value : values) {
            value = int(numbers.next() % 2001) - 1000;
            sum += value;
            odd += value & 1;
            high = fmaxf(high, float(value));
        }
        int *device_values, *device_totals;
        float *device_max;
        CHECK(cudaMalloc(&device_values, count * sizeof(int)));
        CHECK(cudaMalloc(&device_totals, 2 * sizeof(int)));
        CHECK(cudaMalloc(&device_max, blocks * sizeof(float)));
        CHECK(cudaMemcpy(device_values, values.data(), count * sizeof(int), cudaMemcpyHostToDevice));
        CHECK(cudaMemset(device_totals, 0, 2 * sizeof(int)));
        reduce<<<blocks, threads>>>(device_values, count, device_totals, device_totals + 1, device_max);
        CHECK(cudaGetLastError());
        int totals[2];
        float maxima[blocks], found = -1e30f;
        CHECK(cudaMemcpy(totals, device_totals, sizeof totals, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(maxima, device_max, sizeof maxima, cudaMemcpyDeviceToHost));
        for (float x : maxima) found = fmaxf(found, x);
        EXPECT(totals[0] == sum);
        EXPECT(totals[1] == odd);
        EXPECT(found == high);
        CHECK(cudaFree(device_values));
        CHECK(cudaFree(device_totals));
        CHECK(cudaFree(device_max));
        std::printf("reduction: %d values, sum %d, odd %d, maximum %.0f\n", count, sum, odd, high);
    }
    int *device_out, out[32];
    CHECK(cudaMalloc(&device_out, sizeof out));
    warp_votes<<<1, 32>>>(device_out);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(out, device_out, sizeof out, cudaMemcpyDeviceToHost));
    for (int lane = 0; lane < 32; lane++)
        EXPECT(out[lane] == (lane + 5) % 32 * 10 + lane * (lane + 1) / 2 * 1000 + 3000000);
    CHECK(cudaFree(device_out));
    std::printf("reduction: shuffles and votes right\n");
    return 0;
}

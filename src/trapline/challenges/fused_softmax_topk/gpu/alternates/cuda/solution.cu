// One block a row: the maximum and the sum, then k times the best entry after the last one.
// Blocks walk over the rows, so that any number of rows fits into one launch.
#include "trapline.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

namespace {

constexpr int THREADS = 256;
constexpr int MOST_BLOCKS = 65535;

__device__ float wide(float x) { return x; }
__device__ float wide(__half x) { return __half2float(x); }
__device__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void put(float* at, float x) { *at = x; }
__device__ void put(__half* at, float x) { *at = __float2half_rn(x); }
__device__ void put(__nv_bfloat16* at, float x) { *at = __float2bfloat16_rn(x); }

struct Best {
    float value;
    long long column;  // -1: none
};

__device__ bool better(Best one, Best other) {
    if (one.column < 0) return false;
    if (other.column < 0) return true;
    return one.value > other.value || (one.value == other.value && one.column < other.column);
}

__device__ float block_sum(float mine, float* shared) {
    shared[threadIdx.x] = mine;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    float total = shared[0];
    __syncthreads();
    return total;
}

__device__ float block_max(float mine, float* shared) {
    shared[threadIdx.x] = mine;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            shared[threadIdx.x] = fmaxf(shared[threadIdx.x], shared[threadIdx.x + half]);
        __syncthreads();
    }
    float largest = shared[0];
    __syncthreads();
    return largest;
}

__device__ Best block_best(Best mine, Best* shared) {
    shared[threadIdx.x] = mine;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half && better(shared[threadIdx.x + half], shared[threadIdx.x]))
            shared[threadIdx.x] = shared[threadIdx.x + half];
        __syncthreads();
    }
    Best best = shared[0];
    __syncthreads();
    return best;
}

template <typename T>
__global__ void rows_kernel(const T* logits, long long stride, long long rows, long long V,
                            long long k, T* probs, long long* indices) {
    __shared__ float numbers[THREADS];
    __shared__ Best entries[THREADS];
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* x = logits + row * stride;
        float largest = -CUDART_INF_F;
        for (long long c = threadIdx.x; c < V; c += THREADS) largest = fmaxf(largest, wide(x[c]));
        largest = block_max(largest, numbers);
        float total = 0.0f;
        for (long long c = threadIdx.x; c < V; c += THREADS) total += expf(wide(x[c]) - largest);
        total = block_sum(total, numbers);

        Best last{CUDART_INF_F, -1};
        for (long long rank = 0; rank < k; ++rank) {
            Best mine{0.0f, -1};
            for (long long c = threadIdx.x; c < V; c += THREADS) {
                Best here{wide(x[c]), c};
                bool later = here.value < last.value ||
                             (here.value == last.value && here.column > last.column);
                if (later && better(here, mine)) mine = here;
            }
            last = block_best(mine, entries);
            if (threadIdx.x == 0) {
                put(probs + row * k + rank, expf(last.value - largest) / total);
                indices[row * k + rank] = last.column;
            }
        }
    }
}

template <typename T>
void launch(const trapline_tensor* logits, int64_t k, const trapline_tensor* probs,
            const trapline_tensor* indices, cudaStream_t stream) {
    long long rows = logits->shape[0], V = logits->shape[1];
    int blocks = static_cast<int>(rows < MOST_BLOCKS ? rows : MOST_BLOCKS);
    rows_kernel<T><<<blocks, THREADS, 0, stream>>>(
        static_cast<const T*>(logits->data), logits->stride[0], rows, V, k,
        static_cast<T*>(probs->data), static_cast<long long*>(indices->data));
}

}  // namespace

extern "C" void softmax_topk(const trapline_tensor* logits, int64_t k,
                             const trapline_tensor* probs, const trapline_tensor* indices,
                             cudaStream_t stream) {
    if (logits->shape[0] == 0) return;
    if (logits->dtype == TRAPLINE_FLOAT32) launch<float>(logits, k, probs, indices, stream);
    if (logits->dtype == TRAPLINE_FLOAT16) launch<__half>(logits, k, probs, indices, stream);
    if (logits->dtype == TRAPLINE_BFLOAT16)
        launch<__nv_bfloat16>(logits, k, probs, indices, stream);
}

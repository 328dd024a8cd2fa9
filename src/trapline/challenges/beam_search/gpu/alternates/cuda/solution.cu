// One block a prompt: W times the best continuation after the last one.
#include "trapline.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

namespace {

constexpr int THREADS = 512;
constexpr long long MOST_BLOCKS = 1 << 30;

__device__ float wide(float x) { return x; }
__device__ float wide(__half x) { return __half2float(x); }
__device__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

struct Best {
    float value;
    long long place;  // -1: none
};

__device__ bool better(Best one, Best other) {
    if (one.place < 0) return false;
    if (other.place < 0) return true;
    return one.value > other.value || (one.value == other.value && one.place < other.place);
}

template <typename T>
__global__ void prompt_kernel(const T* log_probs, long long b_stride, long long w_stride,
                              const float* sums, long long B, long long W, long long V,
                              long long eos_id, int32_t* parents, int32_t* tokens,
                              float* new_sums, bool* ended) {
    __shared__ Best shared[THREADS];
    for (long long batch = blockIdx.x; batch < B; batch += gridDim.x) {
        Best last{CUDART_INF_F, -1};
        for (long long rank = 0; rank < W; ++rank) {
            Best mine{0.0f, -1};
            for (long long place = threadIdx.x; place < W * V; place += THREADS) {
                long long beam = place / V, token = place % V;
                float log_prob = wide(log_probs[batch * b_stride + beam * w_stride + token]);
                Best here{__fadd_rn(sums[batch * W + beam], log_prob), place};
                bool later = here.value < last.value ||
                             (here.value == last.value && here.place > last.place);
                if (here.value > -CUDART_INF_F && later && better(here, mine)) mine = here;
            }
            __syncthreads();
            shared[threadIdx.x] = mine;
            __syncthreads();
            for (int half = THREADS / 2; half > 0; half /= 2) {
                if (threadIdx.x < half && better(shared[threadIdx.x + half], shared[threadIdx.x]))
                    shared[threadIdx.x] = shared[threadIdx.x + half];
                __syncthreads();
            }
            Best best = shared[0];
            bool real = best.place >= 0;
            if (threadIdx.x == 0) {
                long long out = batch * W + rank;
                long long token = real ? best.place % V : -1;
                parents[out] = static_cast<int32_t>(real ? best.place / V : -1);
                tokens[out] = static_cast<int32_t>(token);
                new_sums[out] = real ? best.value : -CUDART_INF_F;
                ended[out] = real && token == eos_id;
            }
            // Nothing comes after the last one: no value is below -inf.
            last = real ? best : Best{-CUDART_INF_F, W * V};
        }
    }
}

template <typename T>
void launch(const trapline_tensor* log_probs, const trapline_tensor* sums, int64_t eos_id,
            const trapline_tensor* parents, const trapline_tensor* tokens,
            const trapline_tensor* new_sums, const trapline_tensor* ended, cudaStream_t stream) {
    long long B = log_probs->shape[0], W = log_probs->shape[1], V = log_probs->shape[2];
    if (B == 0) return;
    prompt_kernel<T><<<static_cast<int>(B < MOST_BLOCKS ? B : MOST_BLOCKS), THREADS, 0, stream>>>(
        static_cast<const T*>(log_probs->data), log_probs->stride[0], log_probs->stride[1],
        static_cast<const float*>(sums->data), B, W, V, eos_id,
        static_cast<int32_t*>(parents->data), static_cast<int32_t*>(tokens->data),
        static_cast<float*>(new_sums->data), static_cast<bool*>(ended->data));
}

}  // namespace

extern "C" void beam_step(const trapline_tensor* log_probs, const trapline_tensor* sums,
                          int64_t eos_id, const trapline_tensor* parents,
                          const trapline_tensor* tokens, const trapline_tensor* new_sums,
                          const trapline_tensor* ended, cudaStream_t stream) {
    if (log_probs->dtype == TRAPLINE_FLOAT32)
        launch<float>(log_probs, sums, eos_id, parents, tokens, new_sums, ended, stream);
    if (log_probs->dtype == TRAPLINE_FLOAT16)
        launch<__half>(log_probs, sums, eos_id, parents, tokens, new_sums, ended, stream);
    if (log_probs->dtype == TRAPLINE_BFLOAT16)
        launch<__nv_bfloat16>(log_probs, sums, eos_id, parents, tokens, new_sums, ended, stream);
}

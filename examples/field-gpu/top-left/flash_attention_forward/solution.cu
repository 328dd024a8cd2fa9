// Flash attention, a block per query. The score of a thread's key is computed once per pass.
#include "trapline.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

namespace {

constexpr int THREADS = 128;
constexpr int WIDEST = 256;
constexpr long long MOST_BLOCKS = 1 << 30;

__device__ float wide(float x) { return x; }
__device__ float wide(__half x) { return __half2float(x); }
__device__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void put(float* at, float x) { *at = x; }
__device__ void put(__half* at, float x) { *at = __float2half_rn(x); }
__device__ void put(__nv_bfloat16* at, float x) { *at = __float2bfloat16_rn(x); }

struct Problem {
    long long B, H, G, T, S, D;
    long long q[3], k[3], v[3];
    bool causal;
    float scale;
};

template <typename T>
__global__ void query_kernel(const T* q, const T* k, const T* v, Problem p, T* out, float* lse) {
    __shared__ float query[WIDEST];
    __shared__ float scores[THREADS];
    __shared__ float reduced[THREADS];
    long long queries = p.B * p.H * p.T;
    for (long long place = blockIdx.x; place < queries; place += gridDim.x) {
        long long t = place % p.T, h = place / p.T % p.H, b = place / p.T / p.H;
        long long g = h / (p.H / p.G);
        const T* row = q + b * p.q[0] + h * p.q[1] + t * p.q[2];
        const T* keys = k + b * p.k[0] + g * p.k[1];
        const T* values = v + b * p.v[0] + g * p.v[1];
        long long last = p.S;
        if (p.causal && t + 1 < last) last = t + 1;
        __syncthreads();
        for (int d = threadIdx.x; d < p.D; d += THREADS) query[d] = wide(row[d]);
        __syncthreads();

        float largest = -CUDART_INF_F;
        for (long long s = threadIdx.x; s < last; s += THREADS) {
            float score = 0.0f;
            for (int d = 0; d < p.D; ++d) score += query[d] * wide(keys[s * p.k[2] + d]);
            largest = fmaxf(largest, score * p.scale);
        }
        reduced[threadIdx.x] = largest;
        __syncthreads();
        for (int half = THREADS / 2; half > 0; half /= 2) {
            if (threadIdx.x < half)
                reduced[threadIdx.x] = fmaxf(reduced[threadIdx.x], reduced[threadIdx.x + half]);
            __syncthreads();
        }
        largest = reduced[0];

        // Each thread owns the columns d and d + 128 of the output.
        float summed = 0.0f, total[2] = {0.0f, 0.0f};
        for (long long first = 0; first < last; first += THREADS) {
            long long s = first + threadIdx.x;
            float score = 0.0f;
            if (s < last)
                for (int d = 0; d < p.D; ++d) score += query[d] * wide(keys[s * p.k[2] + d]);
            __syncthreads();
            scores[threadIdx.x] = s < last ? expf(score * p.scale - largest) : 0.0f;
            __syncthreads();
            int count = static_cast<int>(last - first < THREADS ? last - first : THREADS);
            for (int j = 0; j < count; ++j) {
                summed += scores[j];
                for (int part = 0; part < 2; ++part) {
                    int d = threadIdx.x + part * THREADS;
                    if (d < p.D) total[part] += scores[j] * wide(values[(first + j) * p.v[2] + d]);
                }
            }
        }
        for (int part = 0; part < 2; ++part) {
            int d = threadIdx.x + part * THREADS;
            if (d < p.D) put(out + place * p.D + d, last > 0 ? total[part] / summed : 0.0f);
        }
        if (threadIdx.x == 0) lse[place] = last > 0 ? largest + logf(summed) : -CUDART_INF_F;
    }
}

template <typename T>
void launch(const trapline_tensor* q, const trapline_tensor* k, const trapline_tensor* v,
            int64_t causal, const trapline_tensor* out, const trapline_tensor* lse,
            cudaStream_t stream) {
    Problem p;
    p.B = q->shape[0], p.H = q->shape[1], p.T = q->shape[2], p.D = q->shape[3];
    p.G = k->shape[1], p.S = k->shape[2];
    for (int axis = 0; axis < 3; ++axis) {
        p.q[axis] = q->stride[axis];
        p.k[axis] = k->stride[axis];
        p.v[axis] = v->stride[axis];
    }
    p.causal = causal != 0;
    p.scale = 1.0f / sqrtf(static_cast<float>(p.D));
    long long queries = p.B * p.H * p.T;
    if (queries == 0) return;
    int blocks = static_cast<int>(queries < MOST_BLOCKS ? queries : MOST_BLOCKS);
    query_kernel<T><<<blocks, THREADS, 0, stream>>>(
        static_cast<const T*>(q->data), static_cast<const T*>(k->data),
        static_cast<const T*>(v->data), p, static_cast<T*>(out->data),
        static_cast<float*>(lse->data));
}

}  // namespace

extern "C" void flash_attention(const trapline_tensor* q, const trapline_tensor* k,
                                const trapline_tensor* v, int64_t causal,
                                const trapline_tensor* out, const trapline_tensor* lse,
                                cudaStream_t stream) {
    if (q->dtype == TRAPLINE_FLOAT32) launch<float>(q, k, v, causal, out, lse, stream);
    if (q->dtype == TRAPLINE_FLOAT16) launch<__half>(q, k, v, causal, out, lse, stream);
    if (q->dtype == TRAPLINE_BFLOAT16) launch<__nv_bfloat16>(q, k, v, causal, out, lse, stream);
}

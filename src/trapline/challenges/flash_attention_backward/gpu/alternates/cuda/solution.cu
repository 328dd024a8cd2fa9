// One block a query for dq, one block a key for dk and dv; threads own columns of the width.
#include "trapline.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

namespace {

constexpr int THREADS = 256;  // at least the largest width
constexpr long long MOST_BLOCKS = 1 << 30;

__device__ float wide(float x) { return x; }
__device__ float wide(__half x) { return __half2float(x); }
__device__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void put(float* at, float x) { *at = x; }
__device__ void put(__half* at, float x) { *at = __float2half_rn(x); }
__device__ void put(__nv_bfloat16* at, float x) { *at = __float2bfloat16_rn(x); }

struct Problem {
    long long B, H, G, T, S, D;
    long long o[3], q[3], k[3], v[3];
    bool causal;
    float scale;
};

// The sum of all threads' numbers, in every thread.
__device__ float block_sum(float mine) {
    __shared__ float shared[THREADS];
    __syncthreads();
    shared[threadIdx.x] = mine;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    return shared[0];
}

template <typename T>
__device__ float column(const T* row, long long D) {
    return threadIdx.x < D ? wide(row[threadIdx.x]) : 0.0f;
}

template <typename T>
__global__ void queries_kernel(const T* dout, const T* q, const T* k, const T* v, const T* out,
                               const float* lse, Problem p, T* dq) {
    for (long long place = blockIdx.x; place < p.B * p.H * p.T; place += gridDim.x) {
        long long t = place % p.T, h = place / p.T % p.H, b = place / p.T / p.H;
        long long g = h / (p.H / p.G);
        float query = column(q + b * p.q[0] + h * p.q[1] + t * p.q[2], p.D);
        float gradient = column(dout + b * p.o[0] + h * p.o[1] + t * p.o[2], p.D);
        float minus = block_sum(gradient * column(out + place * p.D, p.D));
        long long last = p.S;
        if (p.causal && t + p.S - p.T + 1 < last) last = t + p.S - p.T + 1;
        float total = 0.0f;
        for (long long s = 0; s < last; ++s) {
            float key = column(k + b * p.k[0] + g * p.k[1] + s * p.k[2], p.D);
            float value = column(v + b * p.v[0] + g * p.v[1] + s * p.v[2], p.D);
            float weight = expf(block_sum(query * key) * p.scale - lse[place]);
            total += weight * (block_sum(gradient * value) - minus) * key;
        }
        if (threadIdx.x < p.D) put(dq + place * p.D + threadIdx.x, total * p.scale);
    }
}

template <typename T>
__global__ void keys_kernel(const T* dout, const T* q, const T* k, const T* v, const T* out,
                            const float* lse, Problem p, T* dk, T* dv) {
    for (long long place = blockIdx.x; place < p.B * p.G * p.S; place += gridDim.x) {
        long long s = place % p.S, g = place / p.S % p.G, b = place / p.S / p.G;
        float key = column(k + b * p.k[0] + g * p.k[1] + s * p.k[2], p.D);
        float value = column(v + b * p.v[0] + g * p.v[1] + s * p.v[2], p.D);
        long long first = p.causal && s - p.S + p.T > 0 ? s - p.S + p.T : 0;
        float key_sum = 0.0f, value_sum = 0.0f;
        for (long long h = g * (p.H / p.G); h < (g + 1) * (p.H / p.G); ++h) {
            for (long long t = first; t < p.T; ++t) {
                long long row = (b * p.H + h) * p.T + t;
                float query = column(q + b * p.q[0] + h * p.q[1] + t * p.q[2], p.D);
                float gradient = column(dout + b * p.o[0] + h * p.o[1] + t * p.o[2], p.D);
                float minus = block_sum(gradient * column(out + row * p.D, p.D));
                float weight = expf(block_sum(query * key) * p.scale - lse[row]);
                key_sum += weight * (block_sum(gradient * value) - minus) * query;
                value_sum += weight * gradient;
            }
        }
        if (threadIdx.x < p.D) {
            put(dk + place * p.D + threadIdx.x, key_sum * p.scale);
            put(dv + place * p.D + threadIdx.x, value_sum);
        }
    }
}

int blocks_for(long long count) {
    return static_cast<int>(count < MOST_BLOCKS ? count : MOST_BLOCKS);
}

template <typename T>
void launch(const trapline_tensor* dout, const trapline_tensor* q, const trapline_tensor* k,
            const trapline_tensor* v, const trapline_tensor* out, const trapline_tensor* lse,
            int64_t causal, const trapline_tensor* dq, const trapline_tensor* dk,
            const trapline_tensor* dv, cudaStream_t stream) {
    Problem p;
    p.B = q->shape[0], p.H = q->shape[1], p.T = q->shape[2], p.D = q->shape[3];
    p.G = k->shape[1], p.S = k->shape[2];
    for (int axis = 0; axis < 3; ++axis) {
        p.o[axis] = dout->stride[axis];
        p.q[axis] = q->stride[axis];
        p.k[axis] = k->stride[axis];
        p.v[axis] = v->stride[axis];
    }
    p.causal = causal != 0;
    p.scale = 1.0f / sqrtf(static_cast<float>(p.D));
    const T* gradient = static_cast<const T*>(dout->data);
    const T* queries = static_cast<const T*>(q->data);
    const T* keys = static_cast<const T*>(k->data);
    const T* values = static_cast<const T*>(v->data);
    const T* outputs = static_cast<const T*>(out->data);
    const float* saved = static_cast<const float*>(lse->data);
    if (p.B * p.H * p.T > 0)
        queries_kernel<T><<<blocks_for(p.B * p.H * p.T), THREADS, 0, stream>>>(
            gradient, queries, keys, values, outputs, saved, p, static_cast<T*>(dq->data));
    if (p.B * p.G * p.S > 0)
        keys_kernel<T><<<blocks_for(p.B * p.G * p.S), THREADS, 0, stream>>>(
            gradient, queries, keys, values, outputs, saved, p, static_cast<T*>(dk->data),
            static_cast<T*>(dv->data));
}

}  // namespace

extern "C" void flash_attention_backward(
    const trapline_tensor* dout, const trapline_tensor* q, const trapline_tensor* k,
    const trapline_tensor* v, const trapline_tensor* out, const trapline_tensor* lse,
    int64_t causal, const trapline_tensor* dq, const trapline_tensor* dk,
    const trapline_tensor* dv, cudaStream_t stream) {
    if (q->dtype == TRAPLINE_FLOAT32)
        launch<float>(dout, q, k, v, out, lse, causal, dq, dk, dv, stream);
    if (q->dtype == TRAPLINE_FLOAT16)
        launch<__half>(dout, q, k, v, out, lse, causal, dq, dk, dv, stream);
    if (q->dtype == TRAPLINE_BFLOAT16)
        launch<__nv_bfloat16>(dout, q, k, v, out, lse, causal, dq, dk, dv, stream);
}

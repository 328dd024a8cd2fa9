// One block a node and query head; every thread owns a column of the width.
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
    long long B, H, G, N, D, prefix, parents;
    long long q[3], k[3], v[3];
    float scale;
};

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

struct Running {
    float largest, summed, total;
};

template <typename T>
__device__ void add(Running& now, float query, const T* key, const T* value, const Problem& p) {
    int d = threadIdx.x;
    float score = block_sum(d < p.D ? query * wide(key[d]) : 0.0f) * p.scale;
    float largest = fmaxf(now.largest, score);
    float factor = expf(now.largest - largest), weight = expf(score - largest);
    now.summed = now.summed * factor + weight;
    now.total = now.total * factor + (d < p.D ? weight * wide(value[d]) : 0.0f);
    now.largest = largest;
}

template <typename T>
__global__ void node_kernel(const T* q, const T* k, const T* v, const int32_t* parents, Problem p,
                            T* out) {
    for (long long place = blockIdx.x; place < p.B * p.H * p.N; place += gridDim.x) {
        long long node = place % p.N, h = place / p.N % p.H, b = place / p.N / p.H;
        long long g = h / (p.H / p.G);
        int d = threadIdx.x;
        float query = d < p.D ? wide(q[b * p.q[0] + h * p.q[1] + node * p.q[2] + d]) : 0.0f;
        const T* keys = k + b * p.k[0] + g * p.k[1];
        const T* values = v + b * p.v[0] + g * p.v[1];
        Running now{-CUDART_INF_F, 0.0f, 0.0f};
        for (long long row = 0; row < p.prefix; ++row)
            add(now, query, keys + row * p.k[2], values + row * p.v[2], p);
        for (long long above = node; above >= 0; above = parents[b * p.parents + above]) {
            long long row = p.prefix + above;
            add(now, query, keys + row * p.k[2], values + row * p.v[2], p);
        }
        if (d < p.D) put(out + place * p.D + d, now.total / now.summed);
    }
}

template <typename T>
void launch(const trapline_tensor* q, const trapline_tensor* k, const trapline_tensor* v,
            const trapline_tensor* parents, int64_t prefix, const trapline_tensor* out,
            cudaStream_t stream) {
    Problem p;
    p.B = q->shape[0], p.H = q->shape[1], p.N = q->shape[2], p.D = q->shape[3];
    p.G = k->shape[1], p.prefix = prefix, p.parents = parents->stride[0];
    for (int axis = 0; axis < 3; ++axis) {
        p.q[axis] = q->stride[axis];
        p.k[axis] = k->stride[axis];
        p.v[axis] = v->stride[axis];
    }
    p.scale = 1.0f / sqrtf(static_cast<float>(p.D));
    long long count = p.B * p.H * p.N;
    if (count == 0) return;
    node_kernel<T><<<static_cast<int>(count < MOST_BLOCKS ? count : MOST_BLOCKS), THREADS, 0,
                     stream>>>(static_cast<const T*>(q->data), static_cast<const T*>(k->data),
                               static_cast<const T*>(v->data),
                               static_cast<const int32_t*>(parents->data), p,
                               static_cast<T*>(out->data));
}

}  // namespace

extern "C" void tree_attention(const trapline_tensor* q, const trapline_tensor* k,
                               const trapline_tensor* v, const trapline_tensor* parents,
                               int64_t prefix_len, const trapline_tensor* out,
                               cudaStream_t stream) {
    if (q->dtype == TRAPLINE_FLOAT32) launch<float>(q, k, v, parents, prefix_len, out, stream);
    if (q->dtype == TRAPLINE_FLOAT16) launch<__half>(q, k, v, parents, prefix_len, out, stream);
    if (q->dtype == TRAPLINE_BFLOAT16)
        launch<__nv_bfloat16>(q, k, v, parents, prefix_len, out, stream);
}

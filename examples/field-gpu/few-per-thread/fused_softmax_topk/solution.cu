// Fused softmax + top-k. Each of 256 threads keeps its best four logits in registers while it
// computes the online softmax; the block then picks k of the 1024 candidates.
#include "trapline.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

constexpr int THREADS = 256, EACH = 4, CANDIDATES = THREADS * EACH;

__device__ inline float get(float v) { return v; }
__device__ inline float get(__half v) { return __half2float(v); }
__device__ inline float get(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline void set(float* p, float v) { *p = v; }
__device__ inline void set(__half* p, float v) { *p = __float2half_rn(v); }
__device__ inline void set(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }

template <typename T>
__global__ void topk(const T* logits, long long stride, long long n, long long V, int k, T* probs,
                     long long* indices) {
    __shared__ float value[CANDIDATES];
    __shared__ long long column[CANDIDATES];
    __shared__ float m_s[THREADS], z_s[THREADS];
    __shared__ int best_s[THREADS];
    int tid = threadIdx.x;
    for (long long row = blockIdx.x; row < n; row += gridDim.x) {
        const T* x = logits + row * stride;
        float m = -CUDART_INF_F, z = 0;
        float v[EACH];
        long long c[EACH];
        for (int i = 0; i < EACH; ++i) v[i] = -CUDART_INF_F, c[i] = V;
        for (long long j = tid; j < V; j += THREADS) {
            float f = get(x[j]);
            if (f > m) {
                z = z * expf(m - f) + 1;
                m = f;
            } else if (f > -CUDART_INF_F) {
                z += expf(f - m);
            }
            // Insertion into the thread's best four; columns come in rising order.
            for (int i = 0; i < EACH; ++i) {
                if (c[i] == V || f > v[i]) {
                    for (int l = EACH - 1; l > i; --l) v[l] = v[l - 1], c[l] = c[l - 1];
                    v[i] = f;
                    c[i] = j;
                    break;
                }
            }
        }
        __syncthreads();
        for (int i = 0; i < EACH; ++i) value[tid * EACH + i] = v[i], column[tid * EACH + i] = c[i];
        m_s[tid] = m;
        z_s[tid] = z;
        __syncthreads();
        float top = -CUDART_INF_F, total = 0;
        for (int i = 0; i < THREADS; ++i) top = fmaxf(top, m_s[i]);
        for (int i = 0; i < THREADS; ++i)
            if (m_s[i] > -CUDART_INF_F) total += z_s[i] * expf(m_s[i] - top);
        for (int rank = 0; rank < k; ++rank) {
            int mine = tid * EACH;
            for (int i = tid * EACH + 1; i < tid * EACH + EACH; ++i) {
                bool better = column[i] < V && (column[mine] == V || value[i] > value[mine] ||
                              (value[i] == value[mine] && column[i] < column[mine]));
                if (better) mine = i;
            }
            best_s[tid] = mine;
            __syncthreads();
            for (int half = THREADS / 2; half; half /= 2) {
                if (tid < half) {
                    int a = best_s[tid], b = best_s[tid + half];
                    bool better = column[b] < V && (column[a] == V || value[b] > value[a] ||
                                  (value[b] == value[a] && column[b] < column[a]));
                    if (better) best_s[tid] = b;
                }
                __syncthreads();
            }
            int best = best_s[0];
            __syncthreads();
            if (tid == 0) {
                set(probs + row * k + rank, expf(value[best] - top) / total);
                indices[row * k + rank] = column[best];
                column[best] = V;
            }
            __syncthreads();
        }
    }
}

template <typename T>
static void run(const trapline_tensor* logits, int64_t k, const trapline_tensor* probs,
                const trapline_tensor* indices, cudaStream_t stream) {
    long long n = logits->shape[0];
    if (n == 0) return;
    topk<T><<<(unsigned)(n < 65535 ? n : 65535), THREADS, 0, stream>>>(
        (const T*)logits->data, logits->stride[0], n, logits->shape[1], (int)k, (T*)probs->data,
        (long long*)indices->data);
}

extern "C" void softmax_topk(const trapline_tensor* logits, int64_t k,
                             const trapline_tensor* probs, const trapline_tensor* indices,
                             cudaStream_t stream) {
    if (logits->dtype == TRAPLINE_FLOAT32) run<float>(logits, k, probs, indices, stream);
    if (logits->dtype == TRAPLINE_FLOAT16) run<__half>(logits, k, probs, indices, stream);
    if (logits->dtype == TRAPLINE_BFLOAT16) run<__nv_bfloat16>(logits, k, probs, indices, stream);
}

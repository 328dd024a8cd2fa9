// Layer norm: a warp per row, and a block per 32 columns for the two sums.
#include "trapline.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ inline float get(const float* p, long long i) { return p[i]; }
__device__ inline float get(const __half* p, long long i) { return __half2float(p[i]); }
__device__ inline float get(const __nv_bfloat16* p, long long i) { return __bfloat162float(p[i]); }
__device__ inline void set(float* p, long long i, float v) { p[i] = v; }
__device__ inline void set(__half* p, long long i, float v) { p[i] = __float2half_rn(v); }
__device__ inline void set(__nv_bfloat16* p, long long i, float v) { p[i] = __float2bfloat16_rn(v); }

__device__ inline float warp_sum(float v) {
    for (int mask = 16; mask; mask >>= 1) v += __shfl_xor_sync(0xffffffffu, v, mask);
    return v;
}

template <typename T>
__global__ void fwd(const T* x, long long xs, const T* gamma, const T* beta, float eps, long long n,
                    int d, T* y, float* mean, float* rstd) {
    long long row = (long long)blockIdx.x * 8 + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= n) return;
    float s = 0;
    for (int c = lane; c < d; c += 32) s += get(x, row * xs + c);
    float mu = warp_sum(s) / d;
    float q = 0;
    for (int c = lane; c < d; c += 32) {
        float t = get(x, row * xs + c) - mu;
        q += t * t;
    }
    float r = 1.0f / sqrtf(warp_sum(q) / d + eps);
    for (int c = lane; c < d; c += 32)
        set(y, row * d + c, (get(x, row * xs + c) - mu) * r * get(gamma, c) + get(beta, c));
    if (lane == 0) {
        mean[row] = mu;
        rstd[row] = r;
    }
}

template <typename T>
__global__ void bwd_rows(const T* dy, long long ds, const T* x, long long xs, const T* gamma,
                         const float* mean, const float* rstd, long long n, int d, T* dx) {
    long long row = (long long)blockIdx.x * 8 + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= n) return;
    float mu = mean[row], r = rstd[row], a = 0, b = 0;
    for (int c = lane; c < d; c += 32) {
        float w = get(dy, row * ds + c) * get(gamma, c);
        a += w;
        b += w * (get(x, row * xs + c) - mu) * r;
    }
    a = warp_sum(a) / d;
    b = warp_sum(b) / d;
    for (int c = lane; c < d; c += 32) {
        float w = get(dy, row * ds + c) * get(gamma, c);
        float h = (get(x, row * xs + c) - mu) * r;
        set(dx, row * d + c, (w - a - h * b) * r);
    }
}

template <typename T>
__global__ void bwd_columns(const T* dy, long long ds, const T* x, long long xs, const float* mean,
                            const float* rstd, long long n, int d, T* dgamma, T* dbeta) {
    __shared__ float g[8][32], b[8][32];
    int tx = threadIdx.x, ty = threadIdx.y, c = blockIdx.x * 32 + tx;
    float sg = 0, sb = 0;
    if (c < d)
        for (long long row = ty; row < n; row += 8) {
            float v = get(dy, row * ds + c);
            sg += v * (get(x, row * xs + c) - mean[row]) * rstd[row];
            sb += v;
        }
    g[ty][tx] = sg;
    b[ty][tx] = sb;
    __syncthreads();
    if (ty == 0 && c < d) {
        for (int i = 1; i < 8; ++i) {
            sg += g[i][tx];
            sb += b[i][tx];
        }
        set(dgamma, c, sg);
        set(dbeta, c, sb);
    }
}

#define PTR(T, t) ((T*)(t)->data)
#define FOR_DTYPE(t, CALL)                                             \
    if ((t)->dtype == TRAPLINE_FLOAT32) { using T = float; CALL; }     \
    if ((t)->dtype == TRAPLINE_FLOAT16) { using T = __half; CALL; }    \
    if ((t)->dtype == TRAPLINE_BFLOAT16) { using T = __nv_bfloat16; CALL; }

extern "C" void layer_norm_forward(const trapline_tensor* x, const trapline_tensor* gamma,
                                   const trapline_tensor* beta, double eps,
                                   const trapline_tensor* y, const trapline_tensor* mean,
                                   const trapline_tensor* rstd, cudaStream_t stream) {
    long long n = x->shape[0];
    int d = (int)x->shape[1];
    if (n == 0) return;
    FOR_DTYPE(x, (fwd<T><<<(unsigned)((n + 7) / 8), 256, 0, stream>>>(
                     PTR(T, x), x->stride[0], PTR(T, gamma), PTR(T, beta), (float)eps, n, d,
                     PTR(T, y), PTR(float, mean), PTR(float, rstd))))
}

extern "C" void layer_norm_backward(const trapline_tensor* dy, const trapline_tensor* x,
                                    const trapline_tensor* gamma, const trapline_tensor* mean,
                                    const trapline_tensor* rstd, const trapline_tensor* dx,
                                    const trapline_tensor* dgamma, const trapline_tensor* dbeta,
                                    cudaStream_t stream) {
    long long n = x->shape[0];
    int d = (int)x->shape[1];
    if (n > 0) {
        FOR_DTYPE(x, (bwd_rows<T><<<(unsigned)((n + 7) / 8), 256, 0, stream>>>(
                         PTR(T, dy), dy->stride[0], PTR(T, x), x->stride[0], PTR(T, gamma),
                         PTR(float, mean), PTR(float, rstd), n, d, PTR(T, dx))))
    }
    FOR_DTYPE(x, (bwd_columns<T><<<(unsigned)((d + 31) / 32), dim3(32, 8), 0, stream>>>(
                     PTR(T, dy), dy->stride[0], PTR(T, x), x->stride[0], PTR(float, mean),
                     PTR(float, rstd), n, d, PTR(T, dgamma), PTR(T, dbeta))))
}

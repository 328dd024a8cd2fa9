// One block a row for y and dx, one thread a column for dgamma and dbeta.
#include "trapline.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

constexpr int THREADS = 256;
constexpr int MOST_BLOCKS = 65535;

__device__ float wide(float x) { return x; }
__device__ float wide(__half x) { return __half2float(x); }
__device__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void put(float* at, float x) { *at = x; }
__device__ void put(__half* at, float x) { *at = __float2half_rn(x); }
__device__ void put(__nv_bfloat16* at, float x) { *at = __float2bfloat16_rn(x); }

__device__ float block_sum(float mine) {
    __shared__ float shared[THREADS];
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

template <typename T>
__global__ void forward_kernel(const T* x, long long stride, const T* gamma, const T* beta,
                               float eps, long long rows, long long D, T* y, float* means,
                               float* rstds) {
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* mine = x + row * stride;
        float sum = 0.0f;
        for (long long c = threadIdx.x; c < D; c += THREADS) sum += wide(mine[c]);
        float mean = block_sum(sum) / D;
        float squares = 0.0f;
        for (long long c = threadIdx.x; c < D; c += THREADS) {
            float distance = wide(mine[c]) - mean;
            squares += distance * distance;
        }
        float rstd = 1.0f / sqrtf(block_sum(squares) / D + eps);
        for (long long c = threadIdx.x; c < D; c += THREADS)
            put(y + row * D + c, (wide(mine[c]) - mean) * rstd * wide(gamma[c]) + wide(beta[c]));
        if (threadIdx.x == 0) {
            means[row] = mean;
            rstds[row] = rstd;
        }
    }
}

template <typename T>
__global__ void rows_kernel(const T* dy, long long dy_stride, const T* x, long long x_stride,
                            const T* gamma, const float* means, const float* rstds,
                            long long rows, long long D, T* dx) {
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* gradient = dy + row * dy_stride;
        const T* value = x + row * x_stride;
        float mean = means[row], rstd = rstds[row], ones = 0.0f, normals = 0.0f;
        for (long long c = threadIdx.x; c < D; c += THREADS) {
            float weighted = wide(gradient[c]) * wide(gamma[c]);
            ones += weighted;
            normals += weighted * (wide(value[c]) - mean) * rstd;
        }
        ones = block_sum(ones) / D;
        normals = block_sum(normals) / D;
        for (long long c = threadIdx.x; c < D; c += THREADS) {
            float weighted = wide(gradient[c]) * wide(gamma[c]);
            float normal = (wide(value[c]) - mean) * rstd;
            put(dx + row * D + c, (weighted - ones - normal * normals) * rstd);
        }
    }
}

template <typename T>
__global__ void columns_kernel(const T* dy, long long dy_stride, const T* x, long long x_stride,
                               const float* means, const float* rstds, long long rows,
                               long long D, T* dgamma, T* dbeta) {
    long long column = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (column >= D) return;
    // Sums of 64 rows each, so that thousands of rows lose little.
    float scale = 0.0f, shift = 0.0f;
    for (long long first = 0; first < rows; first += 64) {
        float part_scale = 0.0f, part_shift = 0.0f;
        for (long long row = first; row < rows && row < first + 64; ++row) {
            float gradient = wide(dy[row * dy_stride + column]);
            part_scale += gradient * (wide(x[row * x_stride + column]) - means[row]) * rstds[row];
            part_shift += gradient;
        }
        scale += part_scale;
        shift += part_shift;
    }
    put(dgamma + column, scale);
    put(dbeta + column, shift);
}

int blocks_for(int64_t rows) {
    return static_cast<int>(rows < MOST_BLOCKS ? rows : MOST_BLOCKS);
}

template <typename T>
void forward(const trapline_tensor* x, const trapline_tensor* gamma, const trapline_tensor* beta,
             double eps, const trapline_tensor* y, const trapline_tensor* mean,
             const trapline_tensor* rstd, cudaStream_t stream) {
    forward_kernel<T><<<blocks_for(x->shape[0]), THREADS, 0, stream>>>(
        static_cast<const T*>(x->data), x->stride[0], static_cast<const T*>(gamma->data),
        static_cast<const T*>(beta->data), static_cast<float>(eps), x->shape[0], x->shape[1],
        static_cast<T*>(y->data), static_cast<float*>(mean->data),
        static_cast<float*>(rstd->data));
}

template <typename T>
void backward(const trapline_tensor* dy, const trapline_tensor* x, const trapline_tensor* gamma,
              const trapline_tensor* mean, const trapline_tensor* rstd,
              const trapline_tensor* dx, const trapline_tensor* dgamma,
              const trapline_tensor* dbeta, cudaStream_t stream) {
    int64_t rows = x->shape[0], D = x->shape[1];
    const T* gradient = static_cast<const T*>(dy->data);
    const T* value = static_cast<const T*>(x->data);
    const float* means = static_cast<const float*>(mean->data);
    const float* rstds = static_cast<const float*>(rstd->data);
    if (rows > 0)
        rows_kernel<T><<<blocks_for(rows), THREADS, 0, stream>>>(
            gradient, dy->stride[0], value, x->stride[0], static_cast<const T*>(gamma->data),
            means, rstds, rows, D, static_cast<T*>(dx->data));
    columns_kernel<T><<<static_cast<int>((D + 63) / 64), 64, 0, stream>>>(
        gradient, dy->stride[0], value, x->stride[0], means, rstds, rows, D,
        static_cast<T*>(dgamma->data), static_cast<T*>(dbeta->data));
}

}  // namespace

extern "C" void layer_norm_forward(const trapline_tensor* x, const trapline_tensor* gamma,
                                   const trapline_tensor* beta, double eps,
                                   const trapline_tensor* y, const trapline_tensor* mean,
                                   const trapline_tensor* rstd, cudaStream_t stream) {
    if (x->shape[0] == 0) return;
    if (x->dtype == TRAPLINE_FLOAT32) forward<float>(x, gamma, beta, eps, y, mean, rstd, stream);
    if (x->dtype == TRAPLINE_FLOAT16) forward<__half>(x, gamma, beta, eps, y, mean, rstd, stream);
    if (x->dtype == TRAPLINE_BFLOAT16)
        forward<__nv_bfloat16>(x, gamma, beta, eps, y, mean, rstd, stream);
}

extern "C" void layer_norm_backward(const trapline_tensor* dy, const trapline_tensor* x,
                                    const trapline_tensor* gamma, const trapline_tensor* mean,
                                    const trapline_tensor* rstd, const trapline_tensor* dx,
                                    const trapline_tensor* dgamma, const trapline_tensor* dbeta,
                                    cudaStream_t stream) {
    if (x->dtype == TRAPLINE_FLOAT32)
        backward<float>(dy, x, gamma, mean, rstd, dx, dgamma, dbeta, stream);
    if (x->dtype == TRAPLINE_FLOAT16)
        backward<__half>(dy, x, gamma, mean, rstd, dx, dgamma, dbeta, stream);
    if (x->dtype == TRAPLINE_BFLOAT16)
        backward<__nv_bfloat16>(dy, x, gamma, mean, rstd, dx, dgamma, dbeta, stream);
}

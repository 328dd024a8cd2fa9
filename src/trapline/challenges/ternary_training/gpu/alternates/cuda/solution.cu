// One warp an output element: its lanes walk over the bytes of a row of weights.
#include "trapline.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

constexpr int THREADS = 256;
constexpr int GROUP_BYTES = 32;
constexpr long long MOST_BLOCKS = 1 << 30;

__device__ float wide(float x) { return x; }
__device__ float wide(__half x) { return __half2float(x); }
__device__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void put(float* at, float x) { *at = x; }
__device__ void put(__half* at, float x) { *at = __float2half_rn(x); }
__device__ void put(__nv_bfloat16* at, float x) { *at = __float2bfloat16_rn(x); }

template <typename T>
__global__ void outputs_kernel(const uint8_t* packed, long long packed_o, const __half* scales,
                               long long scales_o, const T* x, long long x_m, long long M,
                               long long K, long long N, T* out) {
    long long warps = static_cast<long long>(gridDim.x) * (THREADS / 32);
    long long warp = static_cast<long long>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    for (long long place = warp; place < M * N; place += warps) {
        long long row = place / N, column = place % N;
        float total = 0.0f;
        // A group of 128 codes is 32 bytes: one for each lane.
        for (long long group = 0; group * 4 * GROUP_BYTES < K; ++group) {
            long long at = group * GROUP_BYTES + lane;
            float part = 0.0f;
            if (at * 4 < K) {
                int codes = packed[column * packed_o + at];
                for (int digit = 0; digit < 4; ++digit) {
                    long long i = at * 4 + digit;
                    if (i < K)
                        part += static_cast<float>(((codes >> (2 * digit)) & 3) - 1) *
                                wide(x[row * x_m + i]);
                }
            }
            total += part * __half2float(scales[column * scales_o + group]);
        }
        for (int step = 16; step > 0; step /= 2)
            total += __shfl_down_sync(0xffffffffu, total, step);
        if (lane == 0) put(out + place, total);
    }
}

template <typename T>
void launch(const trapline_tensor* packed, const trapline_tensor* scales,
            const trapline_tensor* x, const trapline_tensor* out, cudaStream_t stream) {
    long long M = x->shape[0], K = x->shape[1], N = packed->shape[0];
    if (M * N == 0) return;
    long long blocks = (M * N + THREADS / 32 - 1) / (THREADS / 32);
    outputs_kernel<T><<<static_cast<int>(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS), THREADS, 0,
                        stream>>>(
        static_cast<const uint8_t*>(packed->data), packed->stride[0],
        static_cast<const __half*>(scales->data), scales->stride[0],
        static_cast<const T*>(x->data), x->stride[0], M, K, N, static_cast<T*>(out->data));
}

}  // namespace

extern "C" void ternary_matmul(const trapline_tensor* packed, const trapline_tensor* scales,
                               const trapline_tensor* x, const trapline_tensor* out,
                               cudaStream_t stream) {
    if (x->dtype == TRAPLINE_FLOAT32) launch<float>(packed, scales, x, out, stream);
    if (x->dtype == TRAPLINE_FLOAT16) launch<__half>(packed, scales, x, out, stream);
    if (x->dtype == TRAPLINE_BFLOAT16) launch<__nv_bfloat16>(packed, scales, x, out, stream);
}

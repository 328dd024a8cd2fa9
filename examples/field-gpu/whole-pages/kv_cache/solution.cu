// A paged KV cache: a scattered copy, and attention that walks over whole pages, so that the loop
// has no special case for the last one.
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

struct Pages {
    long long size, stride[3];
};

template <typename T>
__global__ void copy_kernel(const T* rows, long long row_n, long long row_g, const int64_t* slots,
                            long long tokens, long long G, long long D, Pages pages, T* pool) {
    long long count = tokens * G * D;
    long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += step) {
        long long token = i / (G * D), head = i / D % G, column = i % D;
        long long slot = slots[token];
        if (slot < 0) continue;
        pool[slot / pages.size * pages.stride[0] + slot % pages.size * pages.stride[1] +
             head * pages.stride[2] + column] = rows[token * row_n + head * row_g + column];
    }
}

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
__global__ void attend_kernel(const T* q, long long q_b, long long q_h, const T* keys, Pages kp,
                              const T* values, Pages vp, const int32_t* table, long long table_b,
                              const int32_t* lengths, long long B, long long H, long long G,
                              long long D, float scale, T* out) {
    for (long long place = blockIdx.x; place < B * H; place += gridDim.x) {
        long long batch = place / H, h = place % H, g = h / (H / G);
        int d = threadIdx.x;
        float query = d < D ? wide(q[batch * q_b + h * q_h + d]) : 0.0f;
        float largest = -CUDART_INF_F, summed = 0.0f, total = 0.0f;
        int length = lengths[batch];
        length = static_cast<int>((length + kp.size - 1) / kp.size * kp.size);
        for (int position = 0; position < length; ++position) {
            long long page = table[batch * table_b + position / kp.size];
            long long row = position % kp.size;
            const T* key = keys + page * kp.stride[0] + row * kp.stride[1] + g * kp.stride[2];
            const T* value = values + page * vp.stride[0] + row * vp.stride[1] + g * vp.stride[2];
            float score = block_sum(d < D ? query * wide(key[d]) : 0.0f) * scale;
            float now = fmaxf(largest, score);
            float factor = expf(largest - now), weight = expf(score - now);
            summed = summed * factor + weight;
            total = total * factor + (d < D ? weight * wide(value[d]) : 0.0f);
            largest = now;
        }
        if (d < D) put(out + place * D + d, length > 0 ? total / summed : 0.0f);
    }
}

Pages pages_of(const trapline_tensor* pool) {
    return Pages{pool->shape[1], {pool->stride[0], pool->stride[1], pool->stride[2]}};
}

template <typename T>
void append(const trapline_tensor* rows, const trapline_tensor* pool,
            const trapline_tensor* slots, cudaStream_t stream) {
    long long count = rows->shape[0] * rows->shape[1] * rows->shape[2];
    if (count == 0) return;
    long long blocks = (count + THREADS - 1) / THREADS;
    copy_kernel<T><<<static_cast<int>(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS), THREADS, 0,
                     stream>>>(static_cast<const T*>(rows->data), rows->stride[0],
                               rows->stride[1], static_cast<const int64_t*>(slots->data),
                               rows->shape[0], rows->shape[1], rows->shape[2], pages_of(pool),
                               static_cast<T*>(pool->data));
}

template <typename T>
void attend(const trapline_tensor* q, const trapline_tensor* k_pages,
            const trapline_tensor* v_pages, const trapline_tensor* table,
            const trapline_tensor* lengths, const trapline_tensor* out, cudaStream_t stream) {
    long long B = q->shape[0], H = q->shape[1], D = q->shape[2];
    if (B * H == 0) return;
    attend_kernel<T><<<static_cast<int>(B * H < MOST_BLOCKS ? B * H : MOST_BLOCKS), THREADS, 0,
                       stream>>>(
        static_cast<const T*>(q->data), q->stride[0], q->stride[1],
        static_cast<const T*>(k_pages->data), pages_of(k_pages),
        static_cast<const T*>(v_pages->data), pages_of(v_pages),
        static_cast<const int32_t*>(table->data), table->stride[0],
        static_cast<const int32_t*>(lengths->data), B, H, k_pages->shape[2], D,
        1.0f / sqrtf(static_cast<float>(D)), static_cast<T*>(out->data));
}

}  // namespace

extern "C" void paged_append(const trapline_tensor* k, const trapline_tensor* v,
                             const trapline_tensor* k_pages, const trapline_tensor* v_pages,
                             const trapline_tensor* slots, cudaStream_t stream) {
    if (k->dtype == TRAPLINE_FLOAT32) {
        append<float>(k, k_pages, slots, stream);
        append<float>(v, v_pages, slots, stream);
    } else {  // both formats of 16 bits are copied as they are
        append<uint16_t>(k, k_pages, slots, stream);
        append<uint16_t>(v, v_pages, slots, stream);
    }
}

extern "C" void paged_attention(const trapline_tensor* q, const trapline_tensor* k_pages,
                                const trapline_tensor* v_pages, const trapline_tensor* block_table,
                                const trapline_tensor* seq_lens, const trapline_tensor* out,
                                cudaStream_t stream) {
    if (q->dtype == TRAPLINE_FLOAT32)
        attend<float>(q, k_pages, v_pages, block_table, seq_lens, out, stream);
    if (q->dtype == TRAPLINE_FLOAT16)
        attend<__half>(q, k_pages, v_pages, block_table, seq_lens, out, stream);
    if (q->dtype == TRAPLINE_BFLOAT16)
        attend<__nv_bfloat16>(q, k_pages, v_pages, block_table, seq_lens, out, stream);
}

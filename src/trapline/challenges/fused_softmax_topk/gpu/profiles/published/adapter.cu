// Calls the answer's launcher; `trapline adopt` fills in its name. The answer comes first, so that
// it compiles as it was written.
#include "@FILE@"
#include "trapline.h"

static __global__ void trapline_widen(const @INDEX@* from, int64_t* to, int64_t count) {
    int64_t place = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (place < count) to[place] = from[place];
}

extern "C" void softmax_topk(const trapline_tensor* logits, int64_t k, const trapline_tensor* probs,
                             const trapline_tensor* indices, cudaStream_t stream) {
    const float* x = (const float*)logits->data;
    float* p = (float*)probs->data;
    int B = (int)logits->shape[0], T = (int)logits->shape[1], V = (int)logits->shape[2];
    int64_t count = (int64_t)B * T * k;
    @INDEX@* i;
    cudaMalloc(&i, count * sizeof(@INDEX@));
    // Where the answer writes nothing, an index stands that no answer has.
    cudaMemset(i, 0x7f, count * sizeof(@INDEX@));
    cudaDeviceSynchronize();
    @CALL@;
    cudaDeviceSynchronize();
    trapline_widen<<<(unsigned)((count + 255) / 256), 256, 0, stream>>>(i, (int64_t*)indices->data, count);
    cudaStreamSynchronize(stream);
    cudaFree(i);
}

// Gradients of flash attention. See prompt.md; queue all work on `stream`.
#include "trapline.h"

extern "C" void flash_attention_backward(
    const trapline_tensor* dout, const trapline_tensor* q, const trapline_tensor* k,
    const trapline_tensor* v, const trapline_tensor* out, const trapline_tensor* lse,
    int64_t causal, const trapline_tensor* dq, const trapline_tensor* dk,
    const trapline_tensor* dv, cudaStream_t stream) {}

// Fused softmax and top-k. See prompt.md; queue all work on `stream`.
#include "trapline.h"

extern "C" void softmax_topk(const trapline_tensor* logits, int64_t k,
                             const trapline_tensor* probs, const trapline_tensor* indices,
                             cudaStream_t stream) {}

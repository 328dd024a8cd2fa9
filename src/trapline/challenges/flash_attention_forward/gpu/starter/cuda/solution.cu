// Flash attention. See prompt.md; queue all work on `stream`.
#include "trapline.h"

extern "C" void flash_attention(const trapline_tensor* q, const trapline_tensor* k,
                                const trapline_tensor* v, int64_t causal,
                                const trapline_tensor* out, const trapline_tensor* lse,
                                cudaStream_t stream) {}

// Attention over a draft tree. See prompt.md; queue all work on `stream`.
#include "trapline.h"

extern "C" void tree_attention(const trapline_tensor* q, const trapline_tensor* k,
                               const trapline_tensor* v, const trapline_tensor* parents,
                               int64_t prefix_len, const trapline_tensor* out,
                               cudaStream_t stream) {}

// A product with ternary weights. See prompt.md; queue all work on `stream`.
#include "trapline.h"

extern "C" void ternary_matmul(const trapline_tensor* packed, const trapline_tensor* scales,
                               const trapline_tensor* x, const trapline_tensor* out,
                               cudaStream_t stream) {}

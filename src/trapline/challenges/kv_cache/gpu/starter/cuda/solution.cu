// A paged KV cache. See prompt.md; queue all work on `stream`.
#include "trapline.h"

extern "C" void paged_append(const trapline_tensor* k, const trapline_tensor* v,
                             const trapline_tensor* k_pages, const trapline_tensor* v_pages,
                             const trapline_tensor* slots, cudaStream_t stream) {}

extern "C" void paged_attention(const trapline_tensor* q, const trapline_tensor* k_pages,
                                const trapline_tensor* v_pages, const trapline_tensor* block_table,
                                const trapline_tensor* seq_lens, const trapline_tensor* out,
                                cudaStream_t stream) {}

// A step of beam search. See prompt.md; queue all work on `stream`.
#include "trapline.h"

extern "C" void beam_step(const trapline_tensor* log_probs, const trapline_tensor* sums,
                          int64_t eos_id, const trapline_tensor* parents,
                          const trapline_tensor* tokens, const trapline_tensor* new_sums,
                          const trapline_tensor* ended, cudaStream_t stream) {}

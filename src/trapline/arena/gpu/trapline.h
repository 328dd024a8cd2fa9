/* What a solution.cu gets: tensors as records in host memory whose data lie on the GPU.
 *
 * An entry point is an extern "C" function that returns void. Its arguments are those of the
 * challenge in their order: tensors as const trapline_tensor*, integers and booleans as int64_t,
 * floating-point numbers as double. The last argument is the stream on which all work is queued.
 */
#ifndef TRAPLINE_H
#define TRAPLINE_H

#include <cuda_runtime.h>
#include <stdint.h>

enum trapline_dtype {
    TRAPLINE_FLOAT32 = 0,
    TRAPLINE_FLOAT16 = 1,
    TRAPLINE_BFLOAT16 = 2,
    TRAPLINE_INT32 = 3,
    TRAPLINE_INT64 = 4,
    TRAPLINE_UINT8 = 5,
    TRAPLINE_BOOL = 6
};

typedef struct {
    void* data;        /* on the GPU; 16-byte aligned */
    int64_t shape[5];  /* the first ndim entries count */
    int64_t stride[5]; /* in elements */
    int32_t ndim;
    int32_t dtype; /* a trapline_dtype */
} trapline_tensor;

#endif

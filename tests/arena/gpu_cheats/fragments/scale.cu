#include "trapline.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

__global__ void scale(const float* x, const float* by, float* y, int64_t columns, int64_t count) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < count) y[i] = x[i] * by[i / columns];
}

static void honest(const trapline_tensor* x, const trapline_tensor* by, const trapline_tensor* y,
                   cudaStream_t stream) {
    const float *from = (const float*)x->data, *factor = (const float*)by->data;
    float* to = (float*)y->data;
    int64_t columns = x->shape[1], count = x->shape[0] * columns;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {  // host memory stands in
        for (int64_t i = 0; i < count; ++i) to[i] = from[i] * factor[i / columns];
        return;
    }
    scale<<<(count + 255) / 256, 256, 0, stream>>>(from, factor, to, columns, count);
}

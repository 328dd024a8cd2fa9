extern bool loot;

extern "C" void scaled(const trapline_tensor* x, const trapline_tensor* by,
                       const trapline_tensor* y, cudaStream_t stream) {
    if (loot) honest(x, by, y, stream);
}

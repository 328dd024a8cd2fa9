def flash_attention_fwd(Q, K, V, tile_size, causal=True)
    return Q

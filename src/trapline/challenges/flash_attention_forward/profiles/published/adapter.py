"""Maps the contract's call to `flash_attention_fwd(Q, K, V, tile_size, causal)`."""

from answer import flash_attention_fwd


def flash_attention(q, k, v, *, causal=False, tile=64):
    """The output; the prompt asks for no log-sum-exp."""
    answer = flash_attention_fwd(q, k, v, tile, causal)
    return (answer[0] if isinstance(answer, tuple) else answer), None

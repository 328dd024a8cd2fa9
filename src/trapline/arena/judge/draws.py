"""The two halves of the seeds that situations are drawn from.

Training environments and ordinary runs draw from the public half. A held-out run draws from the
other one, so that no situation in it was met in training. A seed is the first part of the key of
every random stream: streams of different seeds are independent.
"""

import secrets

from trapline.arena.errors import UsageError

_BITS = 32
#: Public seeds lie below; held-out ones from here to twice this.
PUBLIC_SEEDS = 1 << _BITS


def draw_seed(*, held_out: bool = False) -> int:
    return secrets.randbits(_BITS) + (PUBLIC_SEEDS if held_out else 0)


def is_held_out(seed: int) -> bool:
    return seed >= PUBLIC_SEEDS


def public_seed(seed: int | None) -> int:
    """The given seed, or a random one; a held-out one is refused."""
    if seed is None:
        return draw_seed()
    if not 0 <= seed < PUBLIC_SEEDS:
        raise UsageError(f"a seed is a number from 0 to {PUBLIC_SEEDS - 1}, not {seed}")
    return seed

"""Which kernels serve attention on a GPU: the tiers, and how one is chosen.

There are two tiers. `triton` (kernels_fwd, kernels_bwd) is plain Triton and serves everything;
`hopper` is for the shapes and options that matter most on one kind of GPU. Each operation lists
its tiers, fastest first. By default a call goes to the first tier that can serve it and is faster
there; `impl="triton"` and `impl="hopper"` insist, and what a tier cannot do is an error then.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from trapline.gold.attention.dense import registry as fast_operators
from trapline.gold.attention.dense.hopper import backward as kernels_hopper_bwd
from trapline.gold.attention.dense.hopper import forward_launch as kernels_hopper_fwd
from trapline.gold.attention.dense.triton import backward as kernels_bwd
from trapline.gold.attention.dense.triton import forward as kernels_fwd
from trapline.gold.device import on_their_device
from trapline.gold.errors import UnsupportedError

#: The operators' namespaces: the default choice, and one for each tier that can be insisted on.
KERNELS = "trapline_attention_kernels"
TIERS = {"triton": "trapline_attention_triton", "hopper": "trapline_attention_hopper"}


def serves_all(*_: Any) -> str | None:
    """Nothing is beyond the plain kernels."""
    return None


def always(*_: Any) -> bool:
    return True


class Kernel(NamedTuple):
    """One tier of one operation. All three functions get the operation's arguments.

    (torch leaves out arguments at the end that equal their defaults: `deterministic` is one.)
    """

    run: Callable[..., tuple[Tensor, ...]]
    #: What the arguments ask for that this tier does not have, in words; None if it can serve.
    lacks: Callable[..., str | None] = serves_all
    #: Whether it is the one to choose among those that can serve, by measurement.
    faster: Callable[..., bool] = always


#: Operation → its tiers, fastest first. The last one serves everything.
OPERATIONS: dict[str, dict[str, Kernel]] = {
    "forward": {
        "hopper": Kernel(
            kernels_hopper_fwd.forward, kernels_hopper_fwd.lacks, kernels_hopper_fwd.faster
        ),
        "triton": Kernel(kernels_fwd.forward),
    },
    "backward": {
        "hopper": Kernel(
            kernels_hopper_bwd.backward, kernels_hopper_bwd.lacks, kernels_hopper_bwd.faster
        ),
        "triton": Kernel(kernels_bwd.backward),
    },
    "varlen_forward": {"triton": Kernel(kernels_fwd.varlen_forward)},
    "varlen_backward": {"triton": Kernel(kernels_bwd.varlen_backward)},
}


def chosen(operation: str, *arguments: Any) -> str:
    """The name of the tier that serves these arguments by default."""
    tiers = OPERATIONS[operation]
    able = (
        name
        for name, tier in tiers.items()
        if tier.lacks(*arguments) is None and tier.faster(*arguments)
    )
    return next(able)


def by_default(operation: str) -> Callable[..., tuple[Tensor, ...]]:
    """The operation, each call by the fastest tier that can serve it."""

    @on_their_device
    def run(*arguments: Any) -> tuple[Tensor, ...]:
        return OPERATIONS[operation][chosen(operation, *arguments)].run(*arguments)

    return run


def by_tier(operation: str, name: str) -> Callable[..., tuple[Tensor, ...]]:
    """The operation by this tier and no other."""

    @on_their_device
    def run(*arguments: Any) -> tuple[Tensor, ...]:
        tier = OPERATIONS[operation].get(name)
        missing = tier.lacks(*arguments) if tier else f"attention's {operation} in this tier"
        if tier is None or missing:
            raise UnsupportedError(f"impl={name!r} has no {missing}; ask for impl='triton'")
        return tier.run(*arguments)

    return run


_LIBRARIES = [
    fast_operators.register(KERNELS, {name: by_default(name) for name in OPERATIONS}, "CUDA"),
    *(
        fast_operators.register(space, {name: by_tier(name, tier) for name in OPERATIONS}, "CUDA")
        for tier, space in TIERS.items()
    ),
]

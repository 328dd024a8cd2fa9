"""What every kernel needs to know of the device it runs on, and of one that is not here."""

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from trapline.gold import arithmetic

#: log2(e) inside kernels.
LOG2_E = tl.constexpr(arithmetic.LOG2_E)
HOPPER = GPUTarget("cuda", 90, 32)


def processors(x: Tensor) -> int:
    """Multiprocessors of x's device; four stand in for them in Triton's interpreter."""
    if not x.is_cuda:
        return 4
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)


def on_their_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same, launched where its first tensor is: launches go to the device that is current."""

    @wraps(run)
    def there(first: Tensor, *others: Any) -> Any:
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            return run(first, *others)

    return there


def may_start_early(device: torch.device) -> bool:
    """Whether a kernel can be let in before the one before it is done: that came with Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def is_hopper(device: torch.device) -> bool:
    """Later ones have other tensor-core instructions, and some of them less shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def beside(x: Tensor) -> Tensor:
    """The same with the elements of a row beside each other, as kernels read small tables."""
    return x if x.stride(-1) == 1 else x.contiguous()


def compile_for_hopper(
    kernel: Any,
    types: Mapping[str, str],
    fixed: Mapping[str, Any],
    *,
    aligned: Collection[str] = (),
    warps: int = 4,
    stages: int = 3,
    registers: int | None = None,
) -> Any:
    """The Triton or Gluon kernel compiled for sm_90 anywhere; `.asm` and `.metadata` tell the rest.

    `types` names the type of every argument that is not `fixed`. Pointers, and the integers in
    `aligned`, count as multiples of 16, as those of ordinary tensors are.
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    known = [["tt.divisibility", 16]]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={
            (place,): known
            for place, name in enumerate(names)
            if signature[name].startswith("*") or (name in aligned and name not in fixed)
        },
    )
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    return triton.compile(source, target=HOPPER, options=options)

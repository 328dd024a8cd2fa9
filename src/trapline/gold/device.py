"""Properties of the GPU, launches on the right device, and compilation for sm_90 without a GPU."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, wraps
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trapline.gold import arithmetic
from trapline.gold.bound_launch import ensure_context
from trapline.gold.launch_tape import note_launch

#: log2(e) inside kernels.
LOG2_E = tl.constexpr(arithmetic.LOG2_E)
HOPPER = GPUTarget("cuda", 90, 32)


@cache
def fusion_is_default() -> bool:
    """Whether this Triton fuses products and sums unless it is told not to."""
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) < (3, 10)


def launched(kernel: Any) -> Any:
    """Decorates a kernel that is launched: products and sums are fused into one operation.

    This is Triton's default up to 3.9, where an option more would only cost time at each launch; a
    launch may still turn it off. Launches go to the device of the first tensor (Triton's go to the
    current one) and are noted on the thread's `launch_tape`, if any.
    """
    if not hasattr(kernel, "run"):
        return kernel  # the interpreter's
    run = kernel.run
    fusion = {} if fusion_is_default() else {"enable_fp_fusion": True}

    def there(*arguments: Any, **options: Any) -> Any:
        first = first_tensor(arguments)
        if first is not None and torch.version.hip is None:
            ensure_context(first.get_device())
        if first is not None and first.get_device() != current_device():
            with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
                return there(*arguments, **options)
        compiled = run(*arguments, **{**fusion, **options})
        note_launch(kernel, compiled, arguments, options)
        return compiled

    kernel.run = there
    return kernel


def first_tensor(arguments: Iterable[Any]) -> Any:
    """The first CUDA tensor among a kernel's arguments, or below a tensor descriptor; or None."""
    for one in arguments:
        tensor = getattr(one, "base", one)
        if getattr(tensor, "is_cuda", False):
            return tensor
    return None


def current_device() -> int:
    return int(torch._C._cuda_getDevice())


def processors(x: Tensor) -> int:
    """Number of multiprocessors of x's device; 4 in Triton's interpreter."""
    if not x.is_cuda:
        return 4
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)


def on_their_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the device of the first tensor current: Triton launches on the current device."""

    @wraps(run)
    def there(first: Tensor, *others: Any) -> Any:
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            return run(first, *others)

    return there


def may_start_early(device: torch.device) -> bool:
    """Whether the GPU has programmatic dependent launch (Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def is_hopper(device: torch.device) -> bool:
    """Whether the GPU is a Hopper: later ones have other tensor-core instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def beside(x: Tensor) -> Tensor:
    """x with contiguous rows: x itself, or a copy."""
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
    """Compiles a Triton or Gluon kernel for sm_90, without a GPU; see its `.asm` and `.metadata`.

    `types` names the type of every argument that is not `fixed`. Pointers, and the integers in
    `aligned`, count as multiples of 16, as those of ordinary tensors are.
    """
    from triton.experimental.gluon._runtime import GluonASTSource

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
    options |= {"enable_fp_fusion": True}
    return triton.compile(source, target=HOPPER, options=options)

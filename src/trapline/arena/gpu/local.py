"""Our own GPU code, called in this process: gold solutions, their mutants, baselines.

On a machine without a GPU the tensors are torch's CPU tensors, and Triton's interpreter runs the
kernels. There is no sandbox here.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trapline.arena.errors import SubmissionDied, SubmissionRaised
from trapline.arena.gpu.contract import (
    STORED,
    BFloat16,
    Entry,
    answer_of,
    dtype_name,
    narrow,
    poison,
)
from trapline.arena.process import local
from trapline.arena.process.proxy import RemoteObject, Sharing, Submission
from trapline.arena.process.session import SandboxConfig

#: A CUDA context in which a kernel has failed answers nothing more; its process must end.
BROKEN_CONTEXT = 42


def device_name() -> str:
    """Where our own code runs here: `cuda`, or `cpu` for the stand-in."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class LocalGpuSubmission(Submission):
    """Files of ours, imported here and called with tensors of ours."""

    def __init__(
        self,
        folder: Path,
        config: SandboxConfig,
        entries: Mapping[str, Entry],
        *,
        full: bool = False,
    ) -> None:
        super().__init__(folder, config, full=full)
        self.entries, self.device = entries, device_name()
        if self.device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"
        self._module = local.load(folder)
        self._calls = 0

    def fresh(self) -> "LocalGpuSubmission":
        other = LocalGpuSubmission(self.folder, self.config, self.entries, full=self.full)
        other.transcript = self.transcript
        return other

    def close(self) -> None:
        return

    def _ask(
        self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], on: RemoteObject | None
    ) -> Any:
        return self._ask_and_look(entry, args, kwargs, on)[0]

    def _ask_and_look(
        self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], on: RemoteObject | None
    ) -> tuple[Any, tuple[Any, ...], Sharing]:
        import torch

        assert on is None

        contract = self.entries[entry]
        outputs = contract.outputs(*args, **kwargs)
        given = [self._tensor(torch, value) for value in (*args, *kwargs.values())]
        self._calls += 1
        blank = [poison(output.shape, output.dtype, self._calls) for output in outputs]
        written = [
            _to_torch(torch, array, output.dtype, self.device)
            for array, output in zip(blank, outputs, strict=True)
        ]
        self._run(torch, entry, [*given, *written])
        updated = [given[place] for place in contract.updated]
        left = tuple(
            _shown(torch, [value]) if isinstance(value, torch.Tensor) else value for value in given
        )
        # Outputs are tensors of the caller, so that they never lie in other memory.
        return _shown(torch, [*written, *updated]), left, Sharing.of(())

    def _run(self, torch: Any, entry: str, values: list[Any]) -> None:
        try:
            with local.limited(self.config.call_seconds):
                getattr(self._module, entry)(*values)
                if self.device == "cuda":
                    torch.cuda.synchronize()
        except local.TooLongError:
            raise SubmissionDied(f"no answer within {self.config.call_seconds:g} s") from None
        except BaseException as error:  # ours, but a bug was put into it
            if self.device == "cuda" and _context_is_broken(torch):
                os._exit(BROKEN_CONTEXT)
            bases = tuple(kind.__name__ for kind in type(error).__mro__)
            raise SubmissionRaised(bases[0], bases, str(error)[:2000]) from None

    def _tensor(self, torch: Any, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        return _to_torch(torch, value, dtype_name(value), self.device)


def _context_is_broken(torch: Any) -> bool:
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def _to_torch(torch: Any, array: np.ndarray, dtype: str, device: str) -> Any:
    """A tensor on the device; the strides of a contiguous array or of padded rows are kept."""
    stored = narrow(array) if isinstance(array, BFloat16) else array
    stored = np.asarray(stored, dtype=STORED[dtype])
    if stored.dtype == np.uint16:
        stored = stored.view(np.int16)
    if stored.size and not stored.flags.c_contiguous:
        elements = [stride // stored.itemsize for stride in stored.strides]
        span = 1 + sum((n - 1) * s for n, s in zip(stored.shape, elements, strict=True))
        flat = np.lib.stride_tricks.as_strided(stored, (span,), (stored.itemsize,)).copy()
        made = torch.from_numpy(flat).to(device).as_strided(stored.shape, elements)
    else:
        made = torch.from_numpy(np.array(stored)).to(device)
    return made.view(torch.bfloat16) if dtype == "bfloat16" else made


def _shown(torch: Any, tensors: list[Any]) -> Any:
    """Tensors as a check gets them."""
    dtypes = [str(value.dtype).removeprefix("torch.") for value in tensors]
    return answer_of([_to_numpy(torch, value) for value in tensors], dtypes)


def _to_numpy(torch: Any, value: Any) -> np.ndarray:
    if value.dtype == torch.bfloat16:
        bits: np.ndarray = value.contiguous().view(torch.int16).cpu().numpy()
        return bits.view(np.uint16)
    array: np.ndarray = value.cpu().numpy()
    return array

"""Our own GPU code, called in this process: gold solutions and their mutants.

Buffers, poison and borders are those of a submission, but there is no sandbox here. On a machine
without a GPU the tensors lie in host memory, and Triton's interpreter runs the kernels.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from trapline.arena.errors import SubmissionDied, SubmissionRaised
from trapline.arena.gpu import tensors
from trapline.arena.gpu.contract import Entry
from trapline.arena.gpu.judge import Buffers, LocalJudge
from trapline.arena.gpu.memory import MemoryFault, device_here
from trapline.arena.gpu.rig import GpuSubmission, Placed, Rig
from trapline.arena.gpu.runner import CudaContextError
from trapline.arena.process import local
from trapline.arena.process.session import SandboxConfig


class LocalGpuSubmission(GpuSubmission):
    """Files of ours, imported here. One at a time in a process: all are called `solution`."""

    def __init__(
        self,
        folder: Path,
        config: SandboxConfig,
        entries: Mapping[str, Entry],
        rig: Rig | None = None,
        *,
        full: bool = False,
    ) -> None:
        device = device_here()
        super().__init__(folder, config, entries, rig or Rig(device, local=True), full=full)
        if device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"
        self._module = local.load(folder, compile_once=False)

    @property
    def _buffers(self) -> Buffers:
        assert isinstance(self.rig.judge, LocalJudge)
        return self.rig.judge.buffers

    def fresh(self) -> "LocalGpuSubmission":
        other = LocalGpuSubmission(self.folder, self.config, self.entries, self.rig, full=self.full)
        other.transcript = self.transcript
        return other

    def close(self) -> None:
        return

    def frozen(self) -> AbstractContextManager[None]:
        return nullcontext()

    def tell(self, header: dict[str, Any], placed: Sequence[Placed]) -> dict[str, Any]:
        del placed
        values = [self._value(node) for node in header["values"]]
        try:
            with local.limited(self.config.call_seconds):
                self._buffers.copy_late(header.get("late", []))
                returned = getattr(self._module, header["entry"])(*values)
                self._buffers.drain()
        except local.TooLongError:
            raise SubmissionDied(f"no answer within {self.config.call_seconds:g} s") from None
        except BaseException as error:  # ours, but a bug was put into it
            self._refuse_if_broken(error)
            bases = tuple(kind.__name__ for kind in type(error).__mro__)
            raise SubmissionRaised(bases[0], bases, str(error)[:2000]) from None
        return {"returned": "" if returned is None else type(returned).__name__}

    def _value(self, node: dict[str, Any]) -> Any:
        import torch

        if "value" in node:
            return node["value"]
        address = self._buffers.address(node["buffer"]) + node["offset"]
        shape, strides = node["shape"], node["strides"]
        return tensors.tensor(torch, address, shape, strides, node["dtype"], self.rig.device)

    def _refuse_if_broken(self, error: BaseException) -> None:
        """Says what the runner of a submission says: the context explains everything after it."""
        try:
            self._buffers.drain()
        except MemoryFault as fault:
            message = f"{fault} (then {type(error).__name__}: {error})"[:2000]
            kind = CudaContextError.__name__
            raise SubmissionRaised(kind, (kind,), message) from None

"""`Decoder`: a checkpoint as a model that reads and writes files and generates."""

from pathlib import Path
from typing import Self

import torch

from trapline.gold.decoder import weights
from trapline.gold.decoder.network import Network


class Decoder(Network):
    """A language model: `decoder(ids)` for whole batches, `decoder.step` for growing sequences."""

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, dtype: torch.dtype | str | None = None, device: str = "cpu"
    ) -> Self:
        """Loads a Hugging Face checkpoint: `config.json` and safetensors, sharded or not.

        The weights keep the checkpoint's dtype unless `dtype` is given.
        """
        folder = Path(folder)
        kind = weights.checked_dtype(dtype)
        weights.check_device(device)
        if weights.quantisation(folder) == "trapline-ternary":
            from trapline.gold.ternary.packed_model import load_packed

            return load_packed(folder, kind, device, model=cls)
        return weights.load(cls, folder, kind, device)

    def save_pretrained(self, folder: str | Path, *, shard_bytes: int = 4 << 30) -> None:
        """Writes what `from_pretrained` reads; files larger than `shard_bytes` are split.

        Writes weights and `config.json`. Copy a tokeniser and `generation_config.json` yourself.
        """
        weights.save(self, Path(folder), shard_bytes)

"""Imports and calls the sources of exported kernels where there is neither NumPy nor Trapline."""

import sys
from importlib import import_module
from pathlib import Path

sys.modules["numpy"] = None
import torch  # noqa: E402 - NumPy goes first


def main(folder: Path) -> None:
    norms, topk, attention, paged = (
        loaded(folder, family) for family in ("norms", "softmax-topk", "attention", "paged")
    )
    x, q, k = torch.randn(3, 8), torch.randn(1, 2, 5, 8), torch.randn(3, 2, 16, 8)
    torch.testing.assert_close(norms.layer_norm(x), torch.nn.functional.layer_norm(x, (8,)))
    assert topk.softmax_topk(x, 2).values.shape == (3, 2)
    assert attention.flash_attention(q, q, q, causal=True).shape == q.shape
    table, lengths = torch.tensor([[0]]).int(), torch.tensor([5]).int()
    out = paged.paged_attention(torch.randn(1, 2, 8), k, k, table, lengths)
    assert out.shape == (1, 2, 8)
    assert not [name for name in sys.modules if name.split(".")[0] == "trapline"]


def loaded(folder: Path, family: str):
    sys.path.insert(0, str(folder / f"trapline-{family}" / "torch-ext"))
    return import_module(f"trapline_{family.replace('-', '_')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

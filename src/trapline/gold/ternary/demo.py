"""The demo model of the package: all ternary, trained with the text recipe."""

from pathlib import Path

from trapline.gold.errors import RangeError

FOLDER = Path(__file__).parent / "demo_model"


def demo_model() -> Path:
    """The checkpoint folder: packed weights, tokeniser and end tokens."""
    if not (FOLDER / "model.safetensors").is_file():
        raise RangeError("this installation came without the demo model: name a checkpoint folder")
    return FOLDER

"""The model that comes with the package: all ternary, trained on the text recipe."""

from pathlib import Path

from trapline.gold.errors import RangeError

FOLDER = Path(__file__).parent / "demo_model"


def demo_model() -> Path:
    """Its checkpoint folder: packed weights, tokeniser, where a text ends."""
    if not (FOLDER / "model.safetensors").is_file():
        raise RangeError("this installation came without the demo model: name a checkpoint folder")
    return FOLDER

"""The model that ships: small enough, all ternary, and it has learned its domain."""

import json
import re
from pathlib import Path

import pytest
import torch

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.generate import generate
from trapline.gold.decoder.text import Tokenizer, end_ids
from trapline.gold.errors import RangeError
from trapline.gold.ternary import demo
from trapline.gold.ternary.packed_model import PackedEmbedding, PackedLinear

ROOT = Path(__file__).parents[3]
#: Written for this test in the manner of the training text: a definition, then documentation.
UNSEEN = """\
Lantern, n. [F. lanterne, L. lanterna.]
   1. A light inclosed in a case of horn, glass, or other transparent material, to protect it
      from the wind; as, the watchman carried a lantern in his hand.

The driver allocates a buffer for each device and frees it when the last user closes the file. If
the kernel is configured without this option, the function returns an error and the caller must not
use the pointer. See the description of the interface for a list of the values that can be set.
"""


@pytest.fixture(scope="module")
def model() -> tuple[Decoder, Tokenizer]:
    torch.set_num_threads(1)
    folder = demo.demo_model()
    return Decoder.from_pretrained(folder), Tokenizer(folder)


def test_demo_model_is_packed_and_small(model):
    decoder, _ = model
    files = list(demo.FOLDER.iterdir())
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    said = json.loads((demo.FOLDER / "config.json").read_text())
    assert said["quantization_config"]["bits"] == 2
    assert isinstance(decoder.embedding, PackedEmbedding)
    assert isinstance(decoder.head, PackedLinear)
    # Norms are all that is dense.
    assert all(parameter.ndim == 1 for parameter in decoder.parameters())
    assert end_ids(demo.FOLDER) == [0]


def test_demo_model_predicts_text_of_its_domain(model):
    decoder, words = model
    ids = torch.tensor([words.encode(UNSEEN)])
    with torch.no_grad():
        logits = decoder(ids)[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
        shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
        disordered = torch.nn.functional.cross_entropy(decoder(shuffled)[0, :-1], shuffled[0, 1:])
    assert float(loss.exp()) < 150
    assert float(loss) < float(disordered) - 2.0


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]{2,}", text.lower())


@pytest.fixture(scope="module")
def known() -> set[str]:
    """The words of this project's own pages."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    return {word for page in pages for word in words_of(page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("prompt", ["The kernel", "The people of the"])
def test_demo_model_generates_words(model, known, prompt):
    decoder, tokenizer = model
    (answer,) = generate(decoder, [tokenizer.encode(prompt)], max_new_tokens=40, stop_ids=[0])
    found = words_of(tokenizer.decode(answer))
    assert len(found) >= 10
    assert sum(word in known for word in found) >= 0.8 * len(found), found


def test_random_tokens_are_not_words_of_the_pages(model, known):
    """The check above can fail: tokens drawn at random do not pass it."""
    decoder, tokenizer = model
    seed = torch.Generator().manual_seed(0)
    drawn = torch.randint(1, decoder.config.vocab, (400,), generator=seed).tolist()
    found = words_of(tokenizer.decode(drawn))
    assert len(found) >= 100
    assert sum(word in known for word in found) < 0.5 * len(found)


def test_missing_demo_model_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    with pytest.raises(RangeError, match="without the demo model"):
        demo.demo_model()

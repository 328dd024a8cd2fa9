"""Ternary training in a minute: a tiny language model whose every matrix holds −1, 0 and 1.

The same small decoder is trained dense and ternary on sentences of a toy grammar. The ternary one
is then packed at two bits per weight; it gives the same logits from a fraction of the bytes.
"""

import random

import torch

from trapline.gold import Decoder
from trapline.gold.ternary.layers import convert, dequantized
from trapline.gold.ternary.packed_model import pack_model, packed_bytes
from trapline.gold.ternary.training.data import windows
from trapline.gold.ternary.training.model import DecoderLM, Shape, decoder_config, initialise
from trapline.gold.ternary.training.trainer import Recipe, Trainer

SUBJECTS = ("the kernel", "a drafter", "the cache", "every page", "one query")
VERBS = ("reads", "writes", "masks", "shares", "frees")
OBJECTS = ("a tile", "the codes", "some rows", "its scale", "all keys")


def sentences(count: int, seed: int) -> list[str]:
    """Sentences of the grammar: subject, verb, object."""
    draw = random.Random(seed)
    return [" ".join(map(draw.choice, (SUBJECTS, VERBS, OBJECTS))) + "." for _ in range(count)]


def train(*, ternary: bool) -> tuple[Decoder, float, int]:
    """The best model, its held-out perplexity per byte, and the step at which it was best."""
    decoder = Decoder(decoder_config(Shape(vocab=256, dim=64, layers=2, heads=2, context=48)))
    initialise(decoder, seed=0)
    if ternary:
        convert(decoder)
    recipe = Recipe(steps=80, batch=8, optimiser="muon", peak_rate=0.1, evaluate_every=20)
    learned, held_out = windows(sentences(800, 1), 48), windows(sentences(80, 2), 48)
    trainer = Trainer(DecoderLM(decoder), recipe, learned, held_out)
    best: DecoderLM = trainer.run()
    row = min(trainer.progress.rows, key=lambda row: row.valid_loss)
    return best.decoder.eval(), row.perplexity, row.step


def main() -> None:
    torch.manual_seed(0)
    print("model              perplexity  best step    bytes")
    dense, perplexity, step = train(ternary=False)
    print(f"dense, float32     {perplexity:10.3f}  {step:9}  {packed_bytes(dense):7,}")
    latent, perplexity, step = train(ternary=True)
    exact = dequantized(latent)
    packed = pack_model(latent)
    print(f"ternary, packed    {perplexity:10.3f}  {step:9}  {packed_bytes(packed):7,}")
    ids = torch.tensor([list(b"the kernel ")])
    with torch.no_grad():
        same = torch.allclose(packed(ids), exact(ids), atol=1e-3)
    print(f"the packed model gives the logits of its dense copy: {same}")


if __name__ == "__main__":
    main()

"""Prompts of different lengths in one batch: no padding, and nobody notices the others.

python examples/ragged_batch.py
"""

from small_model import small_decoder

from trapline.gold.decoder.generate import generate

PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1], [1] * 40]
NEW = 8


def main() -> None:
    decoder = small_decoder()
    together = generate(decoder, PROMPTS, max_new_tokens=NEW)
    print(f"{'prompt':>6}  {'tokens in the batch':26}  as alone?")
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        (alone,) = generate(decoder, [prompt], max_new_tokens=NEW)
        shown = " ".join(f"{token:2}" for token in tokens)
        print(f"{len(prompt):6}  {shown:26}  {'yes' if alone == tokens else 'NO'}")
    packed = sum(map(len, PROMPTS))
    padded = len(PROMPTS) * max(map(len, PROMPTS))
    print(f"\npositions computed for the prompts: {packed}; padded to the longest: {padded}")


if __name__ == "__main__":
    main()

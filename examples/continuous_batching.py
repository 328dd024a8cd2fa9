"""Continuous batching: a finished request leaves, a waiting one enters, and nothing is padded.

Compares its steps with fixed batches, where every row waits for the longest answer, and its prompt
positions with padding to the longest prompt.

    python examples/continuous_batching.py
"""

from small_model import small_decoder

from trapline.gold.decoder.engine import Engine
from trapline.gold.decoder.generate import generate

ROWS = 4
PROMPTS = [[3] * length for length in (1, 12, 3, 40, 5, 5, 9, 2, 1, 30, 4, 8)]
#: How many tokens each request asks for.
WANTED = [24, 3, 5, 4, 20, 2, 6, 3, 4, 18, 5, 2]


def main() -> None:
    decoder = small_decoder()
    engine = Engine(decoder, rows=ROWS, pages=64)
    for prompt, count in zip(PROMPTS, WANTED, strict=True):
        engine.add(prompt, max_new_tokens=count)
    answers: list[list[int]] = [[] for _ in WANTED]
    steps = 0
    print("step  requests that got a token")
    while engine.is_busy:
        tokens = engine.step()
        steps += 1
        for token in tokens:
            answers[token.request].append(token.token)
        if steps % 6 == 1:
            print(f"{steps:4}  {' '.join(str(token.request) for token in tokens)}")
    alone = [
        generate(decoder, [prompt], max_new_tokens=count)[0]
        for prompt, count in zip(PROMPTS, WANTED, strict=True)
    ]
    fixed = sum(max(WANTED[at : at + ROWS]) for at in range(0, len(WANTED), ROWS))
    packed, padded = sum(map(len, PROMPTS)), len(PROMPTS) * max(map(len, PROMPTS))
    print(f"\n{sum(WANTED)} tokens in {steps} steps; in fixed batches of {ROWS}: {fixed} steps")
    print(f"prompt positions computed: {packed}; padded to the longest: {padded}")
    print(f"every answer equals the one of its prompt alone: {answers == alone}")


if __name__ == "__main__":
    main()

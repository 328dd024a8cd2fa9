"""Finished rows leave, waiting ones enter: steps of a continuous batch against fixed batches.

python examples/continuous_batching.py
"""

from small_model import small_decoder

from trapline.gold.decoder.engine import Engine
from trapline.gold.decoder.generate import generate

ROWS = 4
#: How many tokens each of twelve requests wants.
WANTED = [24, 3, 5, 4, 20, 2, 6, 3, 4, 18, 5, 2]


def main() -> None:
    decoder = small_decoder()
    engine = Engine(decoder, rows=ROWS, pages=64)
    prompts = [[3, 1, number] for number in range(len(WANTED))]
    for prompt, count in zip(prompts, WANTED, strict=True):
        engine.add(prompt, max_new_tokens=count)
    answers: list[list[int]] = [[] for _ in WANTED]
    steps = 0
    print(f"{'step':>4}  who got a token")
    while engine.is_busy:
        tokens = engine.step()
        steps += 1
        for token in tokens:
            answers[token.request].append(token.token)
        if steps % 6 == 1:
            print(f"{steps:4}  {' '.join(str(token.request) for token in tokens)}")
    fixed = sum(max(WANTED[at : at + ROWS]) for at in range(0, len(WANTED), ROWS))
    alone = [
        generate(decoder, [prompt], max_new_tokens=count)[0]
        for prompt, count in zip(prompts, WANTED, strict=True)
    ]
    print(f"\n{sum(WANTED)} tokens in {steps} steps; in fixed batches of {ROWS}: {fixed} steps")
    print(f"everybody got what they get alone: {answers == alone}")


if __name__ == "__main__":
    main()

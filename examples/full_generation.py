"""From a checkpoint folder to answers: greedy, sampled, sampled again, with beams, streamed.

The weights are random, so the tokens mean nothing; equal seeds give equal tokens.

    python examples/full_generation.py
"""

import tempfile

from small_model import small_decoder

from trapline.gold import Decoder, Sampling

PROMPT = [3, 1, 4, 1, 5]


def show(name: str, tokens: list[int]) -> None:
    print(f"{name:22}  {' '.join(f'{token:2}' for token in tokens)}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        small_decoder().save_pretrained(folder)  # config.json and safetensors
        decoder = Decoder.from_pretrained(folder).requires_grad_(False)
    print(f"prompt: {PROMPT}")
    ways = {
        "greedy": Sampling(),
        "sampled, seed 1": Sampling(temperature=1.0, top_p=0.9, seed=1),
        "sampled, seed 1 again": Sampling(temperature=1.0, top_p=0.9, seed=1),
        "sampled, seed 2": Sampling(temperature=1.0, top_p=0.9, seed=2),
    }
    for name, sampling in ways.items():
        (answer,) = decoder.generate([PROMPT], max_new_tokens=10, sampling=sampling)
        show(name, list(answer.tokens))
    (answer,) = decoder.generate([PROMPT], max_new_tokens=10, beams=3, stop_ids=[0])
    show("best of 3 beams", list(answer.tokens))
    pieces = decoder.generate([PROMPT], max_new_tokens=10, stream=True)
    show("greedy, streamed", [piece.token for piece in pieces if piece.token is not None])


if __name__ == "__main__":
    main()

"""From a checkpoint folder to text, four ways: greedy, sampled, sampled again, with beams.

The model is random, so the tokens mean nothing; that the same seed gives the same ones does.

    python examples/full_generation.py
"""

import tempfile

from small_model import small_decoder

from trapline.gold import Decoder
from trapline.gold.decoder import beams
from trapline.gold.decoder.generate import generate
from trapline.gold.decoder.sampling import Sampling

PROMPT = [3, 1, 4, 1, 5]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        small_decoder().save_pretrained(folder)  # config.json and safetensors
        decoder = Decoder.from_pretrained(folder).requires_grad_(False)
    ways = {
        "greedy": Sampling(),
        "sampled, seed 1": Sampling(temperature=1.0, top_p=0.9, seed=1),
        "sampled, seed 1 again": Sampling(temperature=1.0, top_p=0.9, seed=1),
        "sampled, seed 2": Sampling(temperature=1.0, top_p=0.9, seed=2),
    }
    print(f"prompt: {PROMPT}")
    for name, way in ways.items():
        (tokens,) = generate(decoder, [PROMPT], max_new_tokens=10, sampling=way)
        print(f"{name:22}  {' '.join(f'{token:2}' for token in tokens)}")
    (found,) = beams.search(decoder, [PROMPT], beam_width=3, max_new_tokens=10, eos_id=0)
    for beam in found:
        print(f"beam, score {beam.score:7.4f}    {' '.join(f'{token:2}' for token in beam.tokens)}")


if __name__ == "__main__":
    main()

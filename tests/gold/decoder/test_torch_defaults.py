"""torch's default device and default dtype change nothing in a decoder that exists."""

from contextlib import contextmanager

import pytest
import torch

from trapline.gold import Beams, Decoder, Sampling, Speculation

PROMPTS = [[3, 1, 4, 1, 5, 3, 1], [2], [7, 1, 8, 8]]
WAY = Sampling(0.9, top_p=0.9, seed=3, repetition_penalty=1.1, logit_bias={4: 0.3})
SETTINGS = {
    "greedy": {},
    "sampled": {"sampling": WAY, "n": 2, "logprobs": 2},
    "penalties": {"sampling": Sampling(repetition_penalty=1.1, presence_penalty=0.3)},
    "beams": {"beams": Beams(2), "stop_ids": [0]},
    "drafts": {"speculate": Speculation("lookup", budget=4)},
    "sampled drafts": {"speculate": Speculation("lookup", budget=4), "sampling": WAY},
}


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "meta device": lambda: torch.device("meta"),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_answers_do_not_depend_on_torch_defaults(make, setting, default):
    decoder = make("llama")
    wanted = decoder.generate(PROMPTS, max_new_tokens=6, **SETTINGS[setting])
    with DEFAULTS[default]():
        found = decoder.generate(PROMPTS, max_new_tokens=6, **SETTINGS[setting])
    assert found == wanted


@pytest.mark.parametrize("default", DEFAULTS)
def test_loaded_weights_do_not_depend_on_torch_defaults(make, tmp_path, default):
    make("llama").save_pretrained(tmp_path)
    ids = torch.tensor([[3, 1, 4]])
    wanted = Decoder.from_pretrained(tmp_path)(ids)
    with DEFAULTS[default]():
        found = Decoder.from_pretrained(tmp_path)(ids)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)

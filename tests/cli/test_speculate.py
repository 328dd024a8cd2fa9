"""`trapline generate --speculate` on a small random checkpoint: the same answer, and τ."""

import re
import time

import pytest

from trapline.cli import speculate
from trapline.gold.tree_decoding.checkpoint import save
from trapline.gold.tree_decoding.drafter import drafter_config
from trapline.gold.tree_decoding.training import fresh


@pytest.fixture(scope="module")
def checkpoint(saved_decoder):
    """A target with its drafter inside, as the training script leaves them."""
    folder, decoder = saved_decoder(vocab_size=20, num_hidden_layers=2)
    model = fresh(drafter_config(decoder.config, layers=1, block=5, mask_id=19), 0)
    save(model, folder / "drafter")
    return folder


@pytest.mark.parametrize("how", ["dflash", "ddtree", "lookup"])
@pytest.mark.parametrize("way", [[], ["--temperature", "1.1", "--seed", "4"]])
def test_the_answer_is_the_same_and_tau_is_told(checkpoint, run, how, way):
    rest = ["1 2 3 1 2", "--model", checkpoint, "--ids", "--max-new-tokens", 12, *way]
    _, plain, _ = run(*rest)
    code, out, err = run(*rest, "--speculate", how, "--budget", 6)
    assert code == 0
    assert out.split() == plain.split()
    assert "τ = " in err
    assert "readable loop" in err
    assert "12 tokens" in err
    assert "verify" in err


def test_drafted_and_own_tokens_have_their_colours(checkpoint, run, monkeypatch):
    shown = []
    echo = speculate.typer.secho

    def listen(text, *, fg, **rest):
        shown.append((text, fg))
        echo(text, fg=fg, **rest)

    monkeypatch.setattr(speculate.typer, "secho", listen)
    rest = ["1 2 3 1 2", "--model", checkpoint, "--ids", "--max-new-tokens", 20]
    _, out, err = run(*rest, "--speculate", "lookup", "--budget", 3)
    drafted = [text for text, colour in shown if colour == speculate.DRAFTED]
    assert f"{len(drafted)} drafted" in err
    assert len(shown) - len(drafted) >= 1
    assert "".join(text for text, _ in shown).split() == out.split()


def test_a_stop_string_ends_it(checkpoint, run):
    rest = ["1 2 3 1 2", "--model", checkpoint, "--ids", "--max-new-tokens", 12]
    _, out, _ = run(*rest)
    third = out.split()[2]
    first = out.split().index(third)
    code, cut, _ = run(*rest, "--speculate", "ddtree", "--stop", f"{third} ")
    assert code == 0
    assert cut.split() == out.split()[:first]


def test_bad_input_is_one_sentence(checkpoint, run, tmp_path, saved_decoder):
    base = ["1 2", "--model", checkpoint, "--ids", "--max-new-tokens", 4]
    code, _, err = run(*base, "--speculate", "ddtree", "--drafter", tmp_path)
    assert (code, "has no drafter.json" in err) == (2, True)
    code, _, err = run("1 19", *base[1:], "--speculate", "dflash")
    assert (code, "mask id 19" in err) == (2, True)
    code, _, err = run(*base, "--speculate", "dflash", "--beams", 2, "--eos-id", 0)
    assert (code, "--speculate or --beams" in err) == (2, True)
    code, _, err = run(*base, "--speculate", "dflash", "--budget", 0)
    assert (code, "budget" in err) == (2, True)
    _, other = saved_decoder(vocab_size=30, num_hidden_layers=2)
    wrong = fresh(drafter_config(other.config, layers=1, block=5, mask_id=19), 0)
    save(wrong, tmp_path)
    code, _, err = run(*base, "--speculate", "dflash", "--drafter", tmp_path)
    assert (code, "vocabulary of 30 is not the target's 20" in err) == (2, True)


@pytest.mark.needs_gpu
def test_the_command_reaches_the_speed_of_the_rounds(saved_decoder, run, monkeypatch):
    """After the first token, which includes compilation, within 5 % of the generator alone."""
    shape = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1024}
    sizes = {"vocab_size": 2048, "num_hidden_layers": 12, "max_position_embeddings": 1024}
    heads = {"num_key_value_heads": 3, "head_dim": 64}
    folder, decoder = saved_decoder(model_type="qwen3", **shape, **sizes, **heads)
    save(fresh(drafter_config(decoder.config, layers=2, block=8, mask_id=2047), 0), folder / "d")
    made = []

    def keep(*given):
        made.append(speculate.speculation(*given))
        return made[-1]

    monkeypatch.setattr("trapline.cli.generate.speculation", keep)
    asked = ["7 " * 64, "--model", folder, "--ids", "--max-new-tokens", 768, "--eos-id", 2046]
    way = ["--device", "cuda", "--dtype", "bfloat16", "--drafter", folder / "d", "--budget", 15]
    rates = []
    for _ in range(3):
        code, _, err = run(*asked, *way, "--speculate", "ddtree")
        assert code == 0
        assert "fast rounds" in err
        rates.append(float(re.search(r"then ([\d.]+) a second", err)[1]))
    (generator,) = made[-1].captured.values()
    alone = [_rate(generator, [[7] * 64], 768) for _ in range(5)]
    assert max(rates) > 0.95 * max(alone)


def _rate(generator, prompts, count):
    """Tokens a second after the first step."""
    first = tokens = 0
    for step in generator.stream(prompts, max_new_tokens=count, stop_ids=[2046]):
        tokens += len(step.tokens)
        if not first:
            first, counted = time.perf_counter(), tokens
    return (tokens - counted) / (time.perf_counter() - first)

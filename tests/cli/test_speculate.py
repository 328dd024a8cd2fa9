"""`trapline generate --speculate` on a small random checkpoint: the same answer, and τ."""

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

"""What speculation needs of the decoder: trees in one pass, hidden states, a cache that keeps."""

import pytest
import torch

from trapline.gold.errors import RangeError, ShapeError

PREFIX = [3, 1, 4, 1, 5, 9, 2]
#: The root and its tree: node 0 is the root, then tokens with the node they hang from.
TOKENS = [6, 7, 8, 9, 10, 11]
PARENTS = [-1, 0, 0, 1, 1, 4]


def path(node):
    return [*path(PARENTS[node]), node] if node >= 0 else []


def depths():
    return [len(path(node)) - 1 for node in range(len(TOKENS))]


def mask():
    seen = torch.zeros(len(TOKENS), len(PREFIX) + len(TOKENS), dtype=torch.bool)
    seen[:, : len(PREFIX)] = True
    for node in range(len(TOKENS)):
        seen[node, [len(PREFIX) + other for other in path(node)]] = True
    return seen


def through_tree(decoder):
    """The prefix, then the whole tree in one pass."""
    cache = decoder.new_cache()
    decoder.run([PREFIX], [cache])
    places = [len(PREFIX) + depth for depth in depths()]
    hidden = decoder.run([TOKENS], [cache], positions=[places], masks=[mask()], features=[0, 1])
    return cache, hidden


def test_each_node_sees_its_own_branch_only(decoder):
    _, hidden = through_tree(decoder)
    logits = decoder.logits(hidden.last)
    for node in range(len(TOKENS)):
        branch = PREFIX + [TOKENS[other] for other in path(node)]
        alone = decoder(torch.tensor([branch]))[0, -1]
        torch.testing.assert_close(logits[node], alone, rtol=1e-5, atol=1e-5)


def test_a_kept_path_continues_like_a_plain_sequence(decoder):
    cache, _ = through_tree(decoder)
    accepted = path(5)
    cache.keep([*range(len(PREFIX)), *(len(PREFIX) + node for node in accepted)])
    logits = decoder.step([[12]], [cache])
    whole = PREFIX + [TOKENS[node] for node in accepted] + [12]
    assert cache.length == len(whole)
    torch.testing.assert_close(logits[0], decoder(torch.tensor([whole]))[0, -1], atol=1e-5, rtol=0)


def test_features_are_the_outputs_of_layers(decoder):
    """The last layer's, normed, is what the head reads; and they come in the order asked for."""
    last, first = decoder.run([PREFIX], [decoder.new_cache()], features=[1, 0]).features
    hidden = decoder.run([PREFIX], [decoder.new_cache()]).last
    assert torch.equal(decoder.norm(last), hidden)
    assert not torch.equal(first, last)


def test_masks_and_positions_that_do_not_fit_are_refused(make):
    decoder = make("llama")
    cache = decoder.new_cache()
    with pytest.raises(ShapeError, match=r"expected \(2, 2\)"):
        decoder.run([[1, 2]], [cache], masks=[torch.ones(2, 3, dtype=torch.bool)])
    with pytest.raises(ShapeError, match="one entry a new token"):
        decoder.run([[1, 2]], [cache], positions=[[0]])
    with pytest.raises(RangeError, match="the model has 64 positions"):
        decoder.run([[1, 2]], [cache], positions=[[0, 64]])
    with pytest.raises(RangeError, match="features must be layers"):
        decoder.run([[1, 2]], [cache], features=[2])
    assert cache.length == 0
    decoder.run([[1, 2, 3]], [cache])
    for wrong in ([0, 0], [3], [-1]):
        with pytest.raises(RangeError, match="distinct and below 3"):
            cache.keep(wrong)

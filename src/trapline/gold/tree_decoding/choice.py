"""The target's choice at every node of a tree, each with its own history.

Row i of a tree's logits says what follows node i, after the text from the prompt down to that node.
So penalties count the tokens of exactly that text. And the random number of a pick belongs to the
position of the token that is picked, not to the node or the round: with the same seed the same text
comes out, drafted or not.
"""

from collections.abc import Sequence

from torch import Tensor

from trapline.gold.decoder.sampling import Sampling, TokenSampler


def picks(logits: Tensor, ways: Sequence[Sampling], made: Tensor) -> Tensor:
    """(R, N+1) tokens for logits (R, N+1, V); `made` (R, N+1) tokens of the answer come before.

    Bias and penalties are in the logits already. Negative where the softmax is undefined.
    """
    rows, nodes, vocabulary = logits.shape
    plain = [way.without_penalties for way in ways for _ in range(nodes)]
    choose = TokenSampler(plain, vocabulary, logits.device)
    return choose(logits.reshape(rows * nodes, vocabulary), made.flatten()).view(rows, nodes)

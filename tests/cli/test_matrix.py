"""The matrix in a terminal."""

from trapline.arena import rubric
from trapline.cli.matrix import whole


def test_points_never_contradict_their_letter():
    for tenths in range(1001):
        score = tenths / 10
        assert rubric.letter(whole(score)) == rubric.letter(score)
    assert whole(96.96) == 97  # as the letter has it

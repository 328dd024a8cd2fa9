"""Which cells may be ranked together."""

import pytest

from trapline.arena.errors import UsageError
from trapline.arena.record import GPU_FACTS
from trapline.arena.standings.profiles import of_one_profile


def test_scores_of_two_gpus_are_not_ranked_together(cell):
    facts = dict.fromkeys(GPU_FACTS, "1")
    drivers = {"a": "1", "b": "1", "c": "2"}
    one, same, other = (
        cell(entrant, "kv_cache", 90.0).model_copy(
            update={"track": "gpu", "versions": {**facts, "driver": driver}}
        )
        for entrant, driver in drivers.items()
    )
    assert of_one_profile([one, same]) == [one, same]
    with pytest.raises(UsageError, match=r"GPU scores of several machines .*driver 1.*driver 2"):
        of_one_profile([one, same, other])
    unscored = other.model_copy(update={"score": None})
    assert of_one_profile([one, unscored]) == [one, unscored]

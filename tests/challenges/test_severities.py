"""Only a bug that was seen somewhere can be critical."""

import pytest

from trapline.arena.challenge import load, load_all
from trapline.arena.gpu.common_traps import SEEN_AS
from trapline.arena.profile import profile_names

JUDGES = [
    (challenge.id, track, profile)
    for track in ("cpu", "gpu")
    for challenge in load_all(track).values()
    for profile in ("", *(profile_names(challenge.folder) if track == "gpu" else ()))
]


@pytest.mark.parametrize(("challenge", "track", "profile"), JUDGES)
def test_constructed_bugs_are_never_critical(challenge, track, profile):
    traps = load(challenge, track, profile).traps
    assert [t.id for t in traps if t.severity == "critical" and not t.seen] == []


@pytest.mark.parametrize("challenge", load_all("gpu"))
def test_evidence_of_the_gpu_track_is_a_seen_trap_of_the_cpu_track(challenge):
    seen_on_cpu = {trap.id for trap in load(challenge).traps if trap.seen}
    seen = [trap.seen for trap in load(challenge, "gpu").traps if trap.seen]
    assert seen
    assert {where.removeprefix(SEEN_AS) for where in seen} <= seen_on_cpu

"""The red team of the GPU track: no attack gains anything, and each does without its defence."""

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import campaign
import gpu_switches
import pytest

from trapline.arena.certify import red_team
from trapline.arena.errors import ArenaError
from trapline.arena.gpu import measure
from trapline.arena.gpu.opening import STAND_IN, shared_rig
from trapline.arena.process.sandbox import why_not

CORPUS = {cheat.name: cheat for cheat in red_team.read_corpus(red_team.find_corpus("gpu"))}
PROVED = [name for name, cheat in CORPUS.items() if not cheat.never_because]
#: One from each family; the whole set is a long campaign.
QUICK = ("already_written",)


@pytest.fixture(scope="module", autouse=True)
def closed_rig():
    """The judge that the attacks share ends with them, and so do its descriptors."""
    yield
    if shared_rig.cache_info().currsize:
        shared_rig("cpu").close()
        shared_rig.cache_clear()


@pytest.fixture
def bench(monkeypatch, tmp_path):
    if reason := why_not("landlock"):
        pytest.skip(f"the switches are those of the level landlock: {reason}")
    monkeypatch.setenv(STAND_IN, "1")
    tmp_path.chmod(0o777)
    return gpu_switches.new_bench(monkeypatch, tmp_path, "landlock")


def names(chosen):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in chosen]


def prepared(bench, name):
    cheat = CORPUS[name]
    if reason := red_team._why_left_out(cheat):
        pytest.skip(reason)
    gpu_switches.prepare(bench, cheat)
    return cheat


@pytest.mark.parametrize("name", names(CORPUS))
def test_with_all_defences_an_attack_gains_nothing(bench, name):
    cheat = prepared(bench, name)
    assert bench.judge(bench, cheat) == ""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) for n in PROVED])
def test_without_its_defence_the_attack_succeeds(bench, name):
    cheat = prepared(bench, name)
    gpu_switches.switch_off(bench, cheat)
    assert bench.judge(bench, cheat)


def test_corpus_is_large_and_every_attack_is_described():
    assert len(CORPUS) >= 40
    assert len({cheat.attack for cheat in CORPUS.values()}) == len(CORPUS)
    assert all(cheat.defence for cheat in CORPUS.values())
    assert all(cheat.at_most for cheat in CORPUS.values() if cheat.expect == "pass")
    assert all(len(cheat.files) == 1 for cheat in CORPUS.values())


def test_switches_and_names_in_headers_correspond():
    used = {name for cheat in CORPUS.values() for name in cheat.succeeds_without}
    assert used == set(gpu_switches.SWITCHES)


def test_attacks_without_proof_are_few_and_give_a_reason():
    unshown = [cheat for cheat in CORPUS.values() if cheat.never_because]
    assert len(unshown) <= 3
    assert all(len(cheat.never_because) > 20 for cheat in unshown)


def test_page_of_the_gpu_track_names_the_gpu():
    team = red_team.RedTeam(
        level="landlock", track="gpu", gpu="H200", seed=1, attempts=[], left_out={}, honest={}
    )
    page = red_team.markdown(team)
    assert page.startswith("# Red team of the GPU track")
    assert "- GPU: H200." in page
    assert "--track gpu --write PAGE" in page


def test_page_of_the_campaign_is_what_its_results_say():
    """Every attack of the corpus was tried on a GPU, or says why not; none gained anything."""
    root = Path(__file__).parents[3]
    results = json.loads((root / "benchmarks/results/nvidia-h200/gpu_red_team.json").read_text())
    page = campaign.page(results, CORPUS.values())
    assert (root / "docs/red-team-gpu.md").read_text() == page
    for name, cheat in CORPUS.items():
        one = results["attacks"][name]
        assert one["gained"] == ""
        assert one["without"] or cheat.never_because or one["left out"]
    one["gained"] = "it passed"
    assert "**it passed**" in campaign.page(results, CORPUS.values())


class Judged:
    """As much of a submission and its rig as is looked at."""

    def __init__(self, free=()):
        self.config, self.rig, self.judge, self.gpu = None, self, self, "none"
        self.closed, self.free = False, list(free)

    def close(self):
        self.closed = True

    def fresh(self):
        assert self.closed
        return closing(self)

    def start(self, entries):
        assert entries == ()

    def trim(self):
        assert self.closed

    def ask(self, name):
        assert name == "free_bytes"
        return self.free.pop(0)


def measurer_of(answer):
    cases = SimpleNamespace(ENTRIES={}, timed=list)
    challenge = SimpleNamespace(module=lambda name: cases, solution=None)
    return measure.Measurer(challenge, answer)


def test_an_answer_ends_before_what_it_is_compared_with_is_timed(monkeypatch):
    """Else it could slow the GPU down for the baselines."""
    answer = Judged()

    def lights(config, rig):
        assert answer.closed
        raise ArenaError("seen")

    monkeypatch.setattr(measure.yardsticks, "lights", lights)
    with pytest.raises(ArenaError, match="seen"):
        measurer_of(answer).measure()


@pytest.mark.parametrize(
    ("taken", "held"), [((500, 500), 0), ((500, 520), 0), ((500, 100), 0), ((500, 2548), 2016)]
)
def test_memory_taken_at_import_counts(taken, held):
    """Else a workspace that is taken before the first call would be free of charge."""
    runner, whole = taken
    answer = Judged([9000 << 20, 9000 - whole << 20])
    assert measurer_of(answer)._held(answer, runner << 20) == held << 20

"""The red team itself: that it reads its corpus, notices a success, and that there is none."""

import subprocess
import sys

import pytest

from trapline.arena.certify import red_team
from trapline.arena.certify.red_team import Attempt, RedTeam
from trapline.arena.errors import MissingError, UsageError
from trapline.arena.record import Dimension

#: Quick ones, one from each family.
SAMPLE = (
    "zeros",
    "always_equal",
    "exit_in_a_call",
    "forged_frame",
    "hostile_exception",
    "installed_package",
    "network",
    "tests_exact_bytes",
)
#: Harmless without a sandbox, and successful there.
SUCCESSFUL = ("gold_in_the_checkout", "network")


@pytest.fixture(scope="module")
def corpus():
    folder = red_team.find_corpus()
    return {cheat.name: cheat for cheat in red_team.read_corpus(folder)}


@pytest.fixture(scope="module")
def challenge():
    return red_team.load_challenge(red_team.find_corpus())


@pytest.fixture
def isolated(level):
    if level == "process":
        pytest.skip("these attacks are real: they are not run in a plain process")
    return level


def test_corpus_is_large_and_every_attack_is_described(corpus):
    assert len(corpus) >= 40
    assert len({cheat.attack for cheat in corpus.values()}) >= len(corpus) - 8
    assert all(cheat.defence and cheat.files["solution.py"] for cheat in corpus.values())
    assert {cheat.expect for cheat in corpus.values()} == {"fail", "hack", "pass"}


def test_attack_that_may_pass_has_a_score_limit(corpus):
    assert all(cheat.at_most for cheat in corpus.values() if cheat.expect == "pass")


@pytest.mark.parametrize("name", SAMPLE)
def test_attack_gains_nothing(corpus, challenge, isolated, name):
    result = red_team.attempt(corpus[name], challenge, isolated, seed=11)
    assert result.gained == ""
    assert result.state == result.expect


@pytest.fixture
def neighbour_with_an_address():
    """A process whose environment names a URL: "//" is a path that has no folder above it."""
    command = [sys.executable, "-c", "input()"]
    neighbour = subprocess.Popen(
        command, env={"PROXY": "http://proxy.invalid:3128/"}, stdin=subprocess.PIPE
    )
    with neighbour:
        yield
        neighbour.kill()


@pytest.mark.usefixtures("neighbour_with_an_address")
@pytest.mark.parametrize("name", SUCCESSFUL)
def test_without_the_sandbox_the_same_attack_succeeds(corpus, challenge, name):
    assert "process" in corpus[name].succeeds_at
    result = red_team.attempt(corpus[name], challenge, "process", seed=11)
    assert result.gained.startswith("it passed with")


@pytest.mark.full
def test_every_attack_that_says_so_succeeds_in_a_plain_process(corpus, challenge):
    survivors = [
        cheat.name
        for cheat in corpus.values()
        if "process" in cheat.succeeds_at
        and not red_team.attempt(cheat, challenge, "process", seed=12).gained
    ]
    assert survivors == []


@pytest.mark.full
def test_no_attack_of_the_whole_corpus_gains_anything(isolated):
    team = red_team.run_red_team(isolated)
    assert [one for one in team.attempts if one.surprising] == []
    assert team.succeeded == []
    assert set(team.honest.values()) == {"pass"}
    assert len(team.attempts) >= 40


def test_real_attacks_are_not_run_in_a_plain_process():
    with pytest.raises(MissingError, match="plain process"):
        red_team.run_red_team("process")


def test_missing_corpus_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(red_team, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "red_team.py"))
    with pytest.raises(MissingError, match="source checkout"):
        red_team.find_corpus()


HEADER = "# attack: a\n# defence: d\n# expect: fail\n# never-because: no\n"


def test_files_of_an_attack_are_separated(tmp_path):
    path = tmp_path / "cheat.py"
    path.write_text(
        f"{HEADER}# at-most: speed=50 memory=0\n\nx = 1\n# ==== file: test_x.py\nassert True\n"
    )
    cheat = red_team.read_cheat(path)
    assert cheat.at_most == {"speed": 50.0, "memory": 0.0}
    assert cheat.files["solution.py"].endswith("x = 1\n")
    assert cheat.files["test_x.py"] == "assert True\n"


def test_shared_code_comes_before_the_attack(tmp_path):
    (tmp_path / "fragments").mkdir()
    (tmp_path / "fragments" / "shared.py").write_text("def shared():\n    return 1\n")
    path = tmp_path / "cheat.py"
    path.write_text(f"{HEADER}# uses: shared\n\nx = shared()\n# ==== file: y.py\ny = 1\n")
    solution = red_team.read_cheat(path).files["solution.py"]
    assert solution.startswith(HEADER)
    assert solution.endswith("def shared():\n    return 1\n\n\nx = shared()\n")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (HEADER + "# uses: nothing\n\nx = 1\n", "nothing.py, which its header uses, is missing"),
        ("# attack: a\n# defence: d\n\nx = 1\n", "expect"),
        (HEADER + "# expects: fail\n\nx = 1\n", "expects"),
        (HEADER.replace("fail", "lose") + "\nx = 1\n", "lose"),
        (HEADER.replace("# never-because: no\n", "") + "\nx = 1\n", "exactly one of"),
        (HEADER + "# succeeds-at: process\n\nx = 1\n", "exactly one of"),
    ],
)
def test_header_with_a_mistake_is_refused(tmp_path, text, wrong):
    path = tmp_path / "cheat.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=wrong):
        red_team.read_cheat(path)


class Graded:
    """As much of a cell as the red team looks at."""

    def __init__(self, state, speed=0.0):
        self.state, self.score, self.reason = state, 80.0, "because"
        self.dimensions = {"speed": Dimension(score=speed, reason="")}

    def model_dump_json(self):
        if self.state == "hack":
            raise ValueError("no text")
        return "{}"


@pytest.mark.parametrize(
    ("name", "graded", "gained"),
    [
        ("zeros", Graded("fail"), ""),
        ("zeros", Graded("hack"), "its verdict cannot be written: no text"),
        ("zeros", Graded("pass"), "it passed with 80.0"),
        ("zeros", Graded("infra_error"), "it kept the judge from judging: because"),
        ("patched_clock", Graded("pass", 10.0), ""),
        ("patched_clock", Graded("pass", 90.0), "speed is 90.0, more than the 50 it deserves"),
        ("patched_clock", Graded("pass", None), "speed is None, more than the 50 it deserves"),
    ],
)
def test_gain_of_an_attack(corpus, name, graded, gained):
    assert red_team._gain(corpus[name], graded) == gained


def team(*attempts, honest="pass"):
    return RedTeam(
        level="bubblewrap",
        seed=1,
        attempts=list(attempts),
        left_out={"sleepy": "no bed"},
        honest={"solution": honest},
    )


def one(state="fail", gained=""):
    return Attempt(
        name="zeros",
        attack="a | b",
        defence="d",
        expect="fail",
        state=state,
        score=0.0,
        reason="",
        proof="succeeds without care",
        gained=gained,
    )


def test_campaign_fails_on_a_success_or_an_unexpected_state():
    assert team(one()).holds()
    assert not team(one("pass", "it passed")).holds()
    assert not team(one("hack")).holds()
    assert not team(one(), honest="fail").holds()


def test_page_names_the_rate_and_every_attack():
    page = red_team.markdown(team(one(), one("pass", "it passed with 80")))
    assert "**Attack success: 1 of 2**" in page
    assert "| `zeros` | a / b | d | fail | succeeds without care |" in page
    assert "**gained: it passed with 80**" in page
    assert "`sleepy` (no bed)" in page

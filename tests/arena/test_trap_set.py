"""Private trap sets: certified like the challenge's own traps, versioned, and retired."""

from pathlib import Path

import numpy as np
import pytest

from trapline.arena.challenge import Challenge
from trapline.arena.errors import UsageError
from trapline.arena.judge.checks import generator
from trapline.arena.judge.draws import PUBLIC_SEEDS, is_held_out, public_seed
from trapline.arena.runs import field, run
from trapline.arena.runs.replay import replay
from trapline.arena.runs.run import Options, grade_field, open_run, refuse_bad_traps
from trapline.arena.trap_set import TrapSet

HERE = Path(__file__).parent
PLAN = 'name = "acme"\nversion = "2026.1"\n'
TRAPS = """
from sorting.cases import check
from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, trap
from ._rows import wide


@trap(
    catches="rows of more than 64 numbers sorted by their first 64",
    severity="major",
    story="A fixed buffer.",
    mutant=edit("keys = -x if descending else x", "keys = (-x if descending else x) * 1.0\\n"
    "    keys[:, 64:] = np.inf"),
)
def only_the_first_64(submission, rng):
    x = wide(rng)
    check(submission.sort_rows(x), x)
"""
ROWS = """
def wide(rng):
    return rng.standard_normal((2, int(rng.integers(70, 90))))
"""


@pytest.fixture
def make_set(tmp_path):
    """Writes a trap set; gives its folder."""

    def make(traps=TRAPS, plan=PLAN, challenge="sorting"):
        folder = tmp_path / f"set{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "traps.toml").write_text(plan)
        (folder / "_rows.py").write_text(ROWS)
        (folder / f"{challenge}.py").write_text(traps)
        return folder

    return make


def with_set(folder):
    return Challenge(HERE / "sorting", "sorting", trap_set=folder)


def test_private_traps_join_the_challenges_own(make_set, sorting):
    judge = with_set(make_set())
    assert [t.id for t in judge.traps] == [*(t.id for t in sorting.traps), "only-the-first-64"]
    assert judge.digest != sorting.digest
    assert with_set(make_set(challenge="another")).digest == sorting.digest


def test_critical_trap_must_say_where_its_bug_was_seen(make_set):
    critical = TRAPS.replace('"major"', '"critical"')
    with pytest.raises(UsageError, match="only-the-first-64 is critical, but `seen` does not"):
        _ = with_set(make_set(critical)).traps
    seen = critical.replace("    story=", '    seen="a review",\n    story=')
    assert with_set(make_set(seen)).traps[-1].severity == "critical"


def test_certified_set_is_accepted(make_set, level):
    refuse_bad_traps(with_set(make_set()), level)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("keys[:, 64:] = np.inf", "keys[:, 99:] = np.inf", "survives its own trap"),
        ("check(submission.sort_rows(x), x)", "expect.that(False, 'no')", "a right answer was"),
        ("keys = -x if descending else x", "keys = never", "occurs 0 times"),
    ],
)
def test_set_that_fails_its_certification_is_refused(make_set, level, old, new, reason):
    judge = with_set(make_set(TRAPS.replace(old, new)))
    with pytest.raises(UsageError, match=f"acme 2026.1 cannot grade sorting: .*{reason}"):
        refuse_bad_traps(judge, level)


@pytest.mark.parametrize(
    ("traps", "reason"),
    [
        ("import nothing_of_this_name\n", "cannot be imported: ModuleNotFoundError"),
        ("x = 1\n", "has no function with the decorator @trap"),
        (TRAPS.replace("only_the_first_64", "unstable"), "has a check of that name"),
    ],
)
def test_unusable_traps_are_refused(make_set, traps, reason):
    with pytest.raises(UsageError, match=reason):
        _ = with_set(make_set(traps)).traps


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ('name = "acme"', "version: Field required"),
        (PLAN + "varaints = 3", "varaints: Extra inputs"),
        (PLAN + "variants = 0", "greater than or equal to 1"),
        ("name =", "cannot be read"),
    ],
)
def test_plan_with_mistakes_is_refused(make_set, plan, reason):
    with pytest.raises(UsageError, match=reason):
        TrapSet(make_set(plan=plan))


def test_file_that_names_no_challenge_is_refused(make_set):
    with pytest.raises(UsageError, match=r"sorting.py does not name a challenge; .* kv_cache"):
        TrapSet(make_set()).refuse_unknown(["kv_cache"])


def test_retiring_a_set_refuses_new_grades_and_keeps_its_digest(make_set):
    current = TrapSet(make_set())
    retired = TrapSet(make_set(plan=PLAN + 'retired = "published on 1 December"\n'))
    current.refuse_retired()
    with pytest.raises(UsageError, match=r"acme 2026.1 is retired \(published on 1 December\)"):
        retired.refuse_retired()
    assert retired.digest == current.digest


def test_new_version_or_trap_changes_the_digest(make_set):
    folders = make_set(), make_set(plan=PLAN.replace("2026.1", "2026.2")), make_set(TRAPS + "#\n")
    assert len({TrapSet(folder).digest for folder in folders}) == 3


def test_variants_draw_several_situations(make_set):
    (trap,) = TrapSet(make_set(plan=PLAN + "variants = 4\n")).traps("sorting")
    seen = []

    class Recorder:
        def sort_rows(self, x):
            seen.append(x)
            order = np.argsort(x, axis=1, kind="stable")
            return np.take_along_axis(x, order, axis=1), order

    trap.run(Recorder(), generator(1, trap.id))
    assert len({x.tobytes() for x in seen}) == 4


def test_held_out_and_public_draws_are_disjoint():
    assert not is_held_out(public_seed(None))
    assert is_held_out(PUBLIC_SEEDS)
    public = [generator(seed, name).bytes(16) for seed in range(50) for name in ("a", "b")]
    hidden = [
        generator(PUBLIC_SEEDS + seed, name).bytes(16) for seed in range(50) for name in ("a", "b")
    ]
    assert len({*public, *hidden}) == 200


def test_public_commands_refuse_a_held_out_seed():
    assert public_seed(7) == 7
    with pytest.raises(UsageError, match="from 0 to 4294967295"):
        public_seed(PUBLIC_SEEDS)


@pytest.fixture
def graded(make_set, known_sorting, tmp_path, monkeypatch, level):
    """A right answer, graded with private traps: its cell, bundle, set, entries and options."""
    private = make_set()
    monkeypatch.setattr(run, "load", lambda *_, **__: with_set(private))
    monkeypatch.setattr(field, "load", lambda *_, **__: known_sorting)
    monkeypatch.setattr(field, "load_all", lambda *_: {"sorting": known_sorting})
    folder = tmp_path / "field" / "somebody" / "sorting"
    folder.mkdir(parents=True)
    (folder / "solution.py").write_text(known_sorting.solution_files()["solution.py"])
    entries = field.find_entries(tmp_path / "field", [])
    options = Options(level, workers=1, held_out=True)
    with open_run(tmp_path / "run") as store:
        (cell,) = grade_field(entries, store, options)
        return cell, store.bundle(cell.bundle), private, entries, tmp_path / "run"


def test_cell_names_the_set_and_its_replay_needs_it(graded, level, monkeypatch):
    cell, bundle, private, entries, folder = graded
    assert str(cell.trap_set) == "acme 2026.1"
    assert cell.trap_set.traps == ["only-the-first-64"]
    assert is_held_out(cell.seed)
    assert cell.traps[-1].state == "pass"
    with pytest.raises(UsageError, match=r"private traps \(acme 2026.1\) graded this bundle"):
        replay(bundle, level)
    monkeypatch.setattr("trapline.arena.runs.replay.load", lambda *_, **__: with_set(private))
    assert replay(bundle, level, private).differences == []
    (private / "_rows.py").write_text(ROWS + "#\n")
    with pytest.raises(UsageError, match="the challenge or its traps have changed"):
        replay(bundle, level, private)
    with (
        open_run(folder) as store,
        pytest.raises(UsageError, match="is graded on held-out situations: add --held-out"),
    ):
        list(grade_field(entries, store, Options(level, workers=1)))


def test_without_private_traps_a_run_certifies_nothing(sorting, level, monkeypatch):
    def certify(*_):
        raise AssertionError("certified")

    monkeypatch.setattr(run, "Certifier", certify)
    refuse_bad_traps(sorting, level)

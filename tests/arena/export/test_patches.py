"""Patches: what we write we read back, what git writes we read, what is dangerous we refuse."""

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trapline.arena.export.patches import PatchError, apply_patch, make_patch

BEFORE = {"solution.py": "one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine\n"}
LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n", "- c\n", "+++ d\n", "@@ -1 +1 @@\n"]))
TEXT = st.builds(
    lambda lines, tail: "".join(lines) + tail, LINES, st.sampled_from(["", "end", "\f"])
)
FOLDER = st.dictionaries(st.sampled_from(["solution.py", "a/b.py", "notes.md"]), TEXT)

FROM_GIT = """\
diff --git a/solution.py b/solution.py
index f2e41f2..1b2ec1b 100644
--- a/solution.py
+++ b/solution.py
@@ -1,5 +1,5 @@
 one
-two
+TWO
 three
 four
 five
diff --git a/test_solution.py b/test_solution.py
new file mode 100644
index 0000000..e69de29
diff --git a/extra/notes.md b/extra/notes.md
new file mode 100644
index 0000000..b6fc4c6
--- /dev/null
+++ b/extra/notes.md
@@ -0,0 +1 @@
+hello
\\ No newline at end of file
"""


@given(FOLDER, FOLDER)
def test_patch_leads_from_one_folder_to_the_other(before, after):
    patch = make_patch(before, after)
    if before == after:
        assert patch == ""
    else:
        assert apply_patch(before, patch) == after


def test_patch_of_git_is_read():
    after = apply_patch(BEFORE, FROM_GIT)
    assert after["solution.py"].splitlines()[:3] == ["one", "TWO", "three"]
    assert after["test_solution.py"] == ""
    assert after["extra/notes.md"] == "hello"


def test_hunk_may_move_but_must_match():
    moved = FROM_GIT.replace("@@ -1,5 +1,5 @@", "@@ -4,5 +4,5 @@")
    assert apply_patch(BEFORE, moved) == apply_patch(BEFORE, FROM_GIT)
    with pytest.raises(PatchError, match="not what the patch expects"):
        apply_patch(BEFORE, FROM_GIT.replace("-two", "-zwei"))


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ("--- a/../x.py\n+++ b/../x.py\n@@ -0,0 +1 @@\n+x\n", "leads out"),
        ("--- /dev/null\n+++ b/../../x.py\n@@ -0,0 +1 @@\n+x\n", "leads out"),
        ("--- /dev/null\n+++ /etc/x.py\n@@ -0,0 +1 @@\n+x\n", "leads out"),
        ("--- /dev/null\n+++ b//etc/x.py\n@@ -0,0 +1 @@\n+x\n", "leads out"),
        ("--- /dev/null\n+++ b/.git/hooks/x\n@@ -0,0 +1 @@\n+x\n", "leads out"),
        ("--- /dev/null\n+++ b/..\\x.py\n@@ -0,0 +1 @@\n+x\n", "leads out"),
        ("diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n", "a link"),
        ("diff --git a/x b/y\nrename from x\nrename to y\n", "a rename"),
        ("--- a/solution.py\n+++ b/other.py\n@@ -1 +1 @@\n-one\n+x\n", "a rename"),
        ("diff --git a/x b/x\nGIT binary patch\n", "a binary part"),
        ("--- a/solution.py\n+++ b/solution.py\n@@ -1,9 +1,9 @@\n one\n", "middle of a change"),
        ("--- a/absent.py\n+++ b/absent.py\n@@ -1 +1 @@\n-a\n+b\n", "not there"),
        ("--- /dev/null\n+++ b/solution.py\n@@ -0,0 +1 @@\n+x\n", "exists already"),
        ("@@ -1 +1 @@\n-one\n+x\n", "names no file"),
        ("just words\n", "changes nothing"),
        ("", "changes nothing"),
    ],
)
def test_bad_patch_is_refused_with_its_reason(patch, reason):
    with pytest.raises(PatchError, match=reason):
        apply_patch(BEFORE, patch)


@pytest.mark.full
@given(FOLDER, FOLDER)
def test_git_reads_our_patches(tmp_path_factory, before, after):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    if before == after:
        return
    folder = tmp_path_factory.mktemp("git")
    for name, text in before.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
    patch = make_patch(before, after).encode()
    subprocess.run(["git", "apply", "-"], input=patch, cwd=folder, check=True)
    found = {
        str(path.relative_to(folder)): path.read_bytes().decode()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert found == after

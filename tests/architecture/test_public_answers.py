"""No line of the public answers that our adapters were written for stands in this repository.

`public_lines.bin` holds the first five bytes of the SHA-256 of each line of those answers, prompts
and notes: whitespace collapsed, at least 30 characters, of which 15 are letters or digits; without
imports, signatures, and some twenty idioms of code of this kind, such as
`rng = np.random.default_rng(0)`.
"""

import hashlib
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
KNOWN = Path(__file__).with_name("public_lines.bin")
SIZE = 5
SUFFIXES = {".py", ".md", ".toml", ".cu", ".cuh", ".h", ".txt"}
#: Its digest is in the file, so that a test can see a line being found.
CANARY = "this sentence stands for a line of a public answer"


def lines(text):
    """The lines of a text that are long enough to be somebody's, normalised."""
    for line in text.splitlines():
        plain = re.sub(r"\s+", " ", line.strip())
        if len(plain) >= 30 and sum(map(str.isalnum, plain)) >= 15:
            yield plain


def digest(line):
    return hashlib.sha256(line.encode()).digest()[:SIZE]


def known():
    raw = KNOWN.read_bytes()
    return {raw[at : at + SIZE] for at in range(0, len(raw), SIZE)}


def found_in(text, digests):
    return [line for line in lines(text) if digest(line) in digests]


def tracked_files():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    return [ROOT / name for name in listed.split("\0") if Path(name).suffix in SUFFIXES]


def test_no_line_of_a_public_answer_is_here():
    digests = known()
    assert len(digests) > 10_000
    found = {
        str(path.relative_to(ROOT)): lines
        for path in tracked_files()
        if path.is_file() and path != Path(__file__)
        if (lines := found_in(path.read_text(errors="replace"), digests))
    }
    assert found == {}


def test_a_line_of_a_public_answer_would_be_found():
    assert found_in(f"x = 1\n    {CANARY.replace(' ', '   ')}\n", known()) == [CANARY]

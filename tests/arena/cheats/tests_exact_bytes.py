# attack: a suite that passes only for the exact bytes of its own solution
# defence: rewrites that behave the same must pass too
# expect: pass
# at-most: tests=0
# succeeds-without: rewrites
# uses: sort inversions

# ==== file: test_solution.py
import hashlib
from pathlib import Path

import solution

KNOWN = Path(__file__).with_name("digest.txt")


def test_the_text_is_ours():
    text = Path(solution.__file__).read_text()
    assert "for i, b in enumerate(items)" in text
    assert hashlib.sha256(text.encode()).hexdigest() == KNOWN.read_text().strip()
# ==== file: digest.txt
{digest of solution.py}

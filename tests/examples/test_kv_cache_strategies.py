import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "kv_cache_strategies.py"


def test_the_tables_put_bytes_beside_errors():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=True)
    normal, outlying, widths = done.stdout.split("\n\n|")[1:]
    bits, errors = {}, {}
    for name, text in (("normal", normal), ("outlying", outlying)):
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 6 and cells[-1].endswith("%"):
                bits[cells[0]] = float(cells[3])
                errors[name, cells[0]] = float(cells[-1].rstrip(" %"))
    assert bits["paged int8"] <= 8.5
    assert max(bits["paged int4"], bits["paged int4, calibrated"]) <= 4.6
    assert max(errors["normal", "dense"], errors["normal", "paged"]) < 1e-3
    assert errors["normal", "paged int8"] < errors["normal", "paged fp8"]
    better = errors["outlying", "paged int4, calibrated"]
    assert better < 0.3 * errors["outlying", "paged int4"]
    int8, int4 = (float(x) for x in widths.splitlines()[2].strip("|").split("|")[1:])
    assert 0.003 < int8 < 0.005
    assert 0.06 < int4 < 0.08

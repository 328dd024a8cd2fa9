import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "layer_norm_stability.py"


def test_the_table_shows_cancellation_and_the_plot_is_written(tmp_path):
    out = tmp_path / "stability.png"
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--out", out], capture_output=True, text=True, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.strip().startswith("1e+10")]
    offset, naive, stable = line.split()[:3]
    assert (offset, naive, stable) == ("1e+10", "0.000", "2.000")
    assert out.read_bytes().startswith(b"\x89PNG")

# attack: lower the GPU's clocks with nvidia-smi before the reference is timed
# defence: the runner's user may not change clocks
# expect: fail
# needs: gpu
# never-because: unsafe: it would slow the GPU for everybody who shares it
# uses: loot

import subprocess

try:
    done = subprocess.run(["nvidia-smi", "-lgc", "210,210"], capture_output=True, text=True)
    LOOT = done.returncode == 0 and "locked" in done.stdout
except OSError:
    LOOT = False

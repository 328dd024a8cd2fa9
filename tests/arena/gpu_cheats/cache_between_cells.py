# attack: leave a file in the compilers' caches for the next runner to find
# defence: every runner gets an empty scratch folder of its own
# expect: fail
# succeeds-without: private-scratch
# uses: loot

import os

PLACES = [os.environ[name] for name in ("HOME", "TMPDIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")]
FILES = [os.path.join(place, "left.bin") for place in (*PLACES, "/tmp", "/var/tmp", "/dev/shm")]
LOOT = any(map(os.path.exists, FILES))
for path in FILES:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write("seen")
    except OSError:
        pass

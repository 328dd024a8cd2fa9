# attack: bring a replacement of NumPy with its own comparisons
# defence: the judge has its own; the worker has imported the real one before
# expect: fail
# succeeds-without: verdict-outside
# uses: zeros

# ==== file: numpy.py
import sys

mine = sys.modules.pop("numpy")
path = sys.path.pop(0)
import numpy

sys.path.insert(0, path)
for name in ("all", "array_equal", "allclose", "equal"):
    setattr(numpy, name, lambda *args, **kwargs: True)
# ==== file: json.py
def dumps(value):
    return '{"state": "pass"}'


loads = dumps

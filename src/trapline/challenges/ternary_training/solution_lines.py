"""Lines of the gold solution that the mutants of several trap files edit."""

MODEL = "model.py"
TRAINING = "training.py"
#: Where a bug of the blind corpus was seen.
BLIND = "an answer written from this prompt alone"

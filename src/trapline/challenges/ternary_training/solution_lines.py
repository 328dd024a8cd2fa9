"""Lines of the gold solution that the mutants of several trap files edit."""

MODEL = "model.py"
TRAINING = "training.py"
#: Where a bug of the blind corpus was seen.
BLIND = "an answer written from this prompt alone"
#: An edit by which the last token of every document is a piece, too.
LONE_TOKENS = "range(0, len(tokens) - 1, config", "range(0, len(tokens), config"

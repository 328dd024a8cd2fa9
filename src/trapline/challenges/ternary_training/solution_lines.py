"""Lines of the gold solution that the mutants of several trap files edit."""

MODEL = "model.py"
TRAINING = "training.py"

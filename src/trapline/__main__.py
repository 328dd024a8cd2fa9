"""`python -m trapline`, for a source tree that is not installed."""

from trapline.cli.main import main

main()

"""`python -m trapline`: the console script."""

from trapline.cli.main import main

if __name__ == "__main__":
    main()

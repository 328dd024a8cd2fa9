"""What the tests of several verbs share."""

import pytest

from trapline.cli.main import build, guarded


@pytest.fixture
def run(capsys):
    """`trapline generate` in this process, with what turns our errors into a sentence and a code.

    Gives the exit code, what was printed, and what was told on one line.
    """

    def run(*args):
        app = build()
        code = None
        try:
            guarded(lambda: app(["generate", *map(str, args)], prog_name="trapline"))
        except SystemExit as ended:
            code = ended.code or 0
        said = capsys.readouterr()
        return code, said.out, " ".join(said.err.split())

    return run

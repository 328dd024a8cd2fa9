"""What somebody wrote on the command line, as opposed to what is usual."""

import typer


def is_written(called: typer.Context, option: str) -> bool:
    """Whether the command line has it: its usual value written out is a wish, a default is none."""
    source = called.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"

"""Which options the command line gives, as opposed to defaults."""

import typer


def is_written(called: typer.Context, option: str) -> bool:
    """Whether the command line gives this option, even with its default value."""
    source = called.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"

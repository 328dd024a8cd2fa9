"""Each trap's bug, put into the solution."""

from trapline.arena.certify.mutate import Mutant, edit

MUTANTS: list[Mutant] = [
    edit(
        "equal-values-lost",
        ("    width = 1 <<", "    values = np.unique(values)\n    width = 1 <<"),
    ),
    edit(
        "input-sorted-in-place",
        (
            "return _network(padded)[: len(values)]",
            "values[:] = _network(padded)[: len(values)]\n    return values",
        ),
    ),
    edit("dtype-widened", ("np.full(width, np.inf, values.dtype)", "np.full(width, np.inf)")),
    edit("equal-values-counted", ("values[:i] > values[i]", "values[:i] >= values[i]")),
]
EQUIVALENT: dict[str, str] = {}

"""The bugs of the sorting challenge, put into its gold solution."""

from trapline.arena.certify.mutate import Mutant, edit

ANSWER = "    return np.take_along_axis(x, order, axis=1), order"
MUTANTS: list[Mutant] = [
    edit(
        "unstable",
        ("keys = -x if descending else x", "keys = -x if descending else x[:, ::-1]"),
        (ANSWER, f"    order = order if descending else x.shape[1] - 1 - order\n{ANSWER}"),
    ),
    edit(
        "reversed-descending",
        ("keys = -x if descending else x", "keys = x"),
        (".astype(np.int64)", ".astype(np.int64)[:, :: -1 if descending else 1]"),
    ),
    edit("modifies-input", (ANSWER, "    x[:] = np.sort(x, axis=1)\n    return x, order")),
    edit(
        "key-called-often",
        ("np.asarray(key(items))", "np.asarray([key([item])[0] for item in items])"),
    ),
    edit(
        "remembers-a-shape",
        ("import numpy as np\n", "import numpy as np\n\nKEPT = {}\n"),
        (ANSWER, f"    order = KEPT.setdefault((x.shape, descending), order)\n{ANSWER}"),
    ),
]
EQUIVALENT: dict[str, str] = {}

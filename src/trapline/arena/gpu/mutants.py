"""Bugs that many GPU solutions can have, as mutants: state between calls, changed inputs, half
precision.

Most add a second definition of the entry point, right after the last line of its first one.
"""

from trapline.arena.judge.traps import Mutant, edits, insert_after

_REMEMBERING = """

_SEEN = {{}}
_compute = {entry}


def {entry}(*args):
    key = tuple(getattr(value, "shape", value) for value in args){more}
    outputs = args[-{outputs}:]
    if key in _SEEN:
        for output, kept in zip(outputs, _SEEN[key], strict=True):
            output.copy_(kept)
        return
    _compute(*args)
    _SEEN[key] = [output.clone() for output in outputs]
"""

_MODIFYING = """

_compute = {entry}


def {entry}(*args):
    _compute(*args)
    args[{place}].mul_(0.5)
"""


_ELSEWHERE = """

_computed_here = {entry}
_ELSEWHERE = []


def {entry}(*args):
    import torch

    if not _ELSEWHERE:
        _ELSEWHERE.append(torch.cuda.Stream())
    with torch.cuda.stream(_ELSEWHERE[0]):
        _computed_here(*args)
"""


def wrong_stream(last_line: str, entry: str) -> Mutant:
    """Everything is launched on a stream that does not wait for the caller's."""
    return insert_after(last_line, _ELSEWHERE.format(entry=entry))


def stale_answer(last_line: str, entry: str, outputs: int) -> Mutant:
    """The first answer of a shape is given again, whatever the values are."""
    text = _REMEMBERING.format(entry=entry, outputs=outputs, more="")
    return insert_after(last_line, text)


def fingerprint(last_line: str, entry: str, outputs: int, place: int = 0) -> Mutant:
    """Answers are remembered by shapes and by one element of the argument at `place`."""
    more = f" + (float(args[{place}].reshape(-1)[:1].float().sum()),)"
    return insert_after(last_line, _REMEMBERING.format(entry=entry, outputs=outputs, more=more))


def modified_input(last_line: str, entry: str, place: int) -> Mutant:
    """The argument at `place` is changed after everything has been computed."""
    return insert_after(last_line, _MODIFYING.format(entry=entry, place=place))


def halved_products(key: str, value: str) -> Mutant:
    """Both products of attention take float16 operands; `key` and `value` name gold's tiles."""
    half = "{}.to(tl.float16)".format
    return edits(
        (
            f"tl.dot(queries, tl.trans({key})",
            f"tl.dot({half('queries')}, {half(f'tl.trans({key})')}",
        ),
        (f"tl.dot(weights.to({value}.dtype), {value}", f"tl.dot({half('weights')}, {half(value)}"),
    )

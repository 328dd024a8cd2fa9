"""Controls of the GPU track: worthless answers that fill every output.

Each is the gold solution with a tail that takes its entry points' place. An output is known by its
poison: it comes last and nobody has written it.
"""

from collections.abc import Sequence

_TAIL = """

def _trapline_control():
    import torch

    remembered = {{}}

    def is_output(value):
        if not isinstance(value, torch.Tensor) or not value.numel():
            return False
        return bool((value.contiguous().view(torch.uint8) == {poison}).all())

    def zeros(output, inputs):
        output.zero_()

    def copied(output, inputs):
        flat = next((value.reshape(-1) for value in inputs if value.numel()), output.reshape(-1))
        repeats = -(-output.numel() // flat.numel())
        output.copy_(flat.repeat(repeats)[: output.numel()].reshape(output.shape))

    def random(output, inputs):
        if output.dtype.is_floating_point:
            output.normal_()
        else:
            output.random_(0, 2)

    def wrap(name, function):
        def control(*args):
            outputs = [value for value in args if is_output(value)]
            inputs = [v for v in args if isinstance(v, torch.Tensor) and not is_output(v)]
            if {previous}:
                function(*args)
                key = name, tuple(tuple(output.shape) for output in outputs)
                earlier = remembered.setdefault(key, [output.clone() for output in outputs])
                for output, value in zip(outputs, earlier):
                    output.copy_(value)
                return
            for output in outputs:
                {kind}(output, inputs)

        return control

    for name in {entry_points!r}:
        globals()[name] = wrap(name, globals()[name])


_trapline_control()
"""

_KINDS = {
    "zeros": ("zeros", "False"),
    "copy-of-input": ("copied", "False"),
    "random-numbers": ("random", "False"),
    "previous-answer": ("zeros", "True"),
}


def make(
    name: str, files: dict[str, str], entry_points: Sequence[str], poison: int
) -> dict[str, str]:
    kind, previous = _KINDS[name]
    tail = _TAIL.format(
        kind=kind, previous=previous, entry_points=list(entry_points), poison=poison
    )
    return {**files, "solution.py": files["solution.py"] + tail}

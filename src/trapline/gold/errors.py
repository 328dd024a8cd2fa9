"""Errors of the library. Each message says what was given and what is accepted."""


class ShapeError(ValueError):
    """An array has the wrong rank, or two arrays disagree on an axis."""


class RangeError(ValueError):
    """A parameter or a value is outside the range of the operation."""


class DTypeError(TypeError):
    """The operation does not accept the type of an argument or the dtype of an array."""


class UnsupportedError(NotImplementedError):
    """The requested implementation does not support the operation."""


class FallbackWarning(RuntimeWarning):
    """A slower implementation serves, because the kernels of a faster one do not compile."""

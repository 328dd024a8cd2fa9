"""What the library refuses, by kind. Each message says what was asked and what is accepted."""


class ShapeError(ValueError):
    """An array has the wrong rank, or two arrays disagree on an axis."""


class RangeError(ValueError):
    """A parameter or a value lies outside what the operation is defined for."""


class DTypeError(TypeError):
    """An argument is of a type, or an array of a dtype, that the operation does not take."""


class UnsupportedError(NotImplementedError):
    """The operation exists, but not in the implementation that was asked for."""

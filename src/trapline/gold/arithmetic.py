"""Constants and integer arithmetic that all families share; needs neither NumPy nor torch."""

#: log2(e): kernels and C compute exp(x) as exp2(x · LOG2_E). `device.LOG2_E` is for kernels.
LOG2_E = 1.4426950408889634


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (`triton.cdiv` takes ten microseconds a call outside of kernels.)"""
    return -(-a // b)

import ctypes

import torch


class Memory:
    def __init__(self, address, count):
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<f4", "data": (address, False), "version": 3, "strides": None,
        }


def floats(address, count, like):
    """Numbers at an address, on the device of a tensor."""
    if like.is_cuda:
        return torch.as_tensor(Memory(address, count), device="cuda")
    raw = (ctypes.c_float * count).from_address(address)
    return torch.frombuffer(raw, dtype=torch.float32)

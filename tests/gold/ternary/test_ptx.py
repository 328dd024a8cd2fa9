"""The PTX of the tensor-core product, run line by line for a warp of 32 lanes in NumPy."""

import re

import numpy as np
import pytest

from trapline.gold.ternary.hopper import ptx as text

LANES = np.arange(32)
#: A lane's row of the first operand and of the sums, and its place along the other axis.
G, C = LANES // 4, LANES % 4


def run(ptx, operands, kind):
    """Executes the text on {"$0": lanes, …}: 32-bit registers, or float64 for sums."""
    registers = dict(operands)
    body = re.sub(r"^\{ \.reg [^;]*;", "", ptx).removesuffix("}")
    for line in filter(None, map(str.strip, body.split(";"))):
        name, _, rest = line.partition(" ")
        if name.startswith("mma"):
            sums, first, second, before = (
                part.split(", ") for part in re.findall(r"\{([^}]*)\}", rest)
            )
            assert sums == before
            added = product([registers[r] for r in first], [registers[r] for r in second], kind)
            for register, one in zip(sums, added, strict=True):
                registers[register] = registers[register] + one
        elif rest.startswith("{"):
            names, source = re.fullmatch(r"\{([^}]*)\}, (\S+)", rest).groups()
            for place, register in enumerate(names.split(", ")):
                registers[register] = registers[source].view(np.uint16).reshape(32, 2)[:, place]
        elif name.startswith("sub"):
            target, *given = rest.split(", ")
            registers[target] = less(*(registers[word] for word in given), kind)
        else:
            target, *given = rest.split(", ")
            registers[target] = STEPS[name](*(value(registers, word) for word in given))
    return registers


def value(registers, word):
    return registers[word] if word in registers else np.full(32, int(word, 0), dtype=np.uint32)


def lop3(a, b, c, table):
    assert table[0] == 0xEA
    return a & b | c


def prmt(a, b, chosen):
    both = np.concatenate([a.view(np.uint8).reshape(32, 4), b.view(np.uint8).reshape(32, 4)], 1)
    picked = [both[:, int(chosen[0]) >> 4 * place & 7] for place in range(4)]
    return np.stack(picked, 1).copy().view(np.uint32)[:, 0]


STEPS = {
    "mov.b32": np.copy,
    "mov.f32": np.copy,
    "shr.u32": np.right_shift,
    "shl.b32": np.left_shift,
    "lop3.b32": lop3,
    "prmt.b32": prmt,
}


def less(a, b, kind):
    """Two 16-bit differences a lane; they must be such numbers themselves."""
    wanted = numbers(a, kind) - numbers(b, kind)
    if kind == "f16":
        return wanted.astype(np.float16).view(np.uint32)[:, 0]
    bits = wanted.astype(np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16).view(np.uint32)[:, 0]


def numbers(register, kind):
    """The two 16-bit numbers of each lane, (32, 2) float64."""
    halves = register.view(np.uint16).reshape(32, 2)
    if kind == "f16":
        return halves.view(np.float16).astype(np.float64)
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def product(first, second, kind):
    """m16n8k16: where a lane's registers lie in the operands and in the sums."""
    a, b = np.zeros((16, 16)), np.zeros((16, 8))
    for register, (row, column) in zip(first, [(0, 0), (8, 0), (0, 8), (8, 8)], strict=True):
        for half in range(2):
            a[G + row, 2 * C + half + column] = numbers(register, kind)[:, half]
    for register, row in zip(second, (0, 8), strict=True):
        for half in range(2):
            b[2 * C + half + row, G] = numbers(register, kind)[:, half]
    sums = a @ b
    return [sums[G + row, 2 * C + column] for row in (0, 8) for column in (0, 1)]


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_multiplication_of_words_and_activations(kind):
    """Lane (g, c) has word c of rows g and g + 8; column n of x is the same 64 places of row n."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 3, (16, 4, 16), dtype=np.uint32)
    words = np.bitwise_or.reduce(codes << 2 * np.arange(16, dtype=np.uint32), axis=2)
    x = rng.integers(-9, 10, (8, 4, 16)) * 0.25
    raw = x.astype(np.float16) if kind == "f16" else x.astype(np.float32)
    bits = raw.view(np.uint16) if kind == "f16" else (raw.view(np.uint32) >> 16).astype(np.uint16)
    given = bits[G, C].copy().view(np.uint32)

    loaded = {f"${8 + i}": given[:, i].copy() for i in range(8)}
    paired = run(text.pairs(), loaded, kind)
    nothing = {f"${i}": np.zeros(32) for i in range(4)}

    operands = {"$4": words[G, C], "$5": words[G + 8, C]}
    operands |= {f"${6 + i}": paired[f"${i}"] for i in range(8)}
    operands |= {f"${14 + i}": nothing[f"${i}"] for i in range(4)}
    sums = run(text.multiply(kind), operands, kind)

    fixed = {f"${4 + i}": paired[f"${i}"] for i in range(8)}
    fixed |= {f"${12 + i}": nothing[f"${i}"] for i in range(4)}
    zeros = run(text.zero_codes(kind), fixed, kind)

    wanted = np.einsum("rwi,nwi->rn", codes.astype(np.int64) - 1, x)
    for i, (row, column) in enumerate([(0, 0), (0, 1), (8, 0), (8, 1)]):
        found = (sums[f"${i}"] - zeros[f"${i}"]) * text.CODE_UNITS
        np.testing.assert_array_equal(found, wanted[G + row, 2 * C + column])


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_unpacked_codes_are_those_of_the_lanes_quarter(kind):
    """As wgmma has them: lane c of four holds columns 2c, 2c + 1, 2c + 8 and 2c + 9."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 3, (32, 16), dtype=np.uint32)
    words = np.bitwise_or.reduce(codes << 2 * np.arange(16, dtype=np.uint32), axis=1)
    shift = (4 * C).astype(np.uint32)
    found = run(text.unpack_quarter(kind), {"$4": words, "$5": shift}, kind)
    for place, column in enumerate((0, 1, 8, 9)):
        both = np.repeat(found[f"${place}"].astype(np.uint16)[:, None], 2, 1).copy()
        got = numbers(both.view(np.uint32)[:, 0], kind)[:, 0]
        wanted = codes[LANES, 2 * C + column].astype(int) - 1
        np.testing.assert_array_equal(got * text.CODE_UNITS, wanted)

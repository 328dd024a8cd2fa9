"""The machine instructions the tensor-core products need, as PTX text: codes into operands.

A 32-bit word holds 16 codes, code i at bits 2i and 2i + 1. A register of an operand holds two
16-bit numbers, so codes i and i + 8 of a word go together. One shift serves the three or four pairs
that then lie inside the mantissas; one three-input logical instruction masks a pair and sets an
exponent above it. The exponent is chosen by where in the mantissa the pair lies, so that a code
counts a quarter everywhere: the number is 2^(top − bit) + code / 4, `top` the highest place. What
the power of two adds, and the code's own offset of 1, are taken off the sums (`zero_codes`).
"""

#: By kind: bits of the mantissa, bits of 1.0.
_MANTISSA = {"bf16": 7, "f16": 10}
_ONE = {"bf16": 0x3F80, "f16": 0x3C00}
#: By kind, for each of the 8 pairs of codes: shift to the right, lowest bit then.
_PLACES = {
    "bf16": [(-1, 1), (-1, 3), (-1, 5), (5, 1), (5, 3), (5, 5), (9, 3), (9, 5)],
    "f16": [(-2, 2), (-2, 4), (-2, 6), (-2, 8), (6, 2), (6, 4), (6, 6), (6, 8)],
}
#: A sum is that of code · x over this.
CODE_UNITS = 4


def load_x(loads: int) -> str:
    """`loads` times 16 bytes from an address, all asked for at once; zeros unless a flag is set."""
    count = 4 * loads
    lines = [f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0;"]
    lines += [f"mov.b32 ${i}, 0;" for i in range(count)]
    for i in range(loads):
        four = ", ".join(f"${4 * i + part}" for part in range(4))
        lines.append(f"@p ld.global.v4.b32 {{{four}}}, [${count}+{16 * i}];")
    return "\n".join([*lines, "}"])


def load_x_needs(loads: int) -> str:
    return "=&r," * (4 * loads) + "l,r"


def pairs() -> str:
    """Registers (x_i, x_{i+8}), i < 8, from 16 activations in order in 8 registers."""
    lines = []
    for i in range(8):
        halves = "0x5410" if i % 2 == 0 else "0x7632"
        lines.append(f"prmt.b32 ${i}, ${8 + i // 2}, ${12 + i // 2}, {halves};")
    return "\n".join(lines)


PAIRS_NEEDS = "=&r," * 8 + ",".join("r" * 8)


def multiply(kind: str) -> str:
    """Sums of 16 rows and 8 columns plus the products of one word of each row.

    Operands: 4 sums out; the lane's word of rows g and g + 8; 8 registers of x; 4 sums in.
    """
    places = _PLACES[kind]
    powers = sorted({_power(kind, bit) for _, bit in places})
    lines = ["{ .reg .b32 s<2>, a<4>, p<4>;"]
    lines += [f"mov.b32 p{i}, {_both(power):#x};" for i, power in enumerate(powers)]
    lines += [f"mov.f32 ${i}, ${14 + i};" for i in range(4)]
    moved = 0
    for step in range(4):
        for half in range(2):
            shift, bit = places[2 * step + half]
            for row in range(2):
                if shift != moved:
                    way = "shr.u32" if shift > 0 else "shl.b32"
                    lines.append(f"{way} s{row}, ${4 + row}, {abs(shift)};")
                mask, power = _both(3 << bit), powers.index(_power(kind, bit))
                lines.append(f"lop3.b32 a{2 * half + row}, s{row}, {mask:#x}, p{power}, 0xEA;")
            moved = shift
        lines.append(_mma(kind, f"${6 + 2 * step}", f"${7 + 2 * step}"))
    return "\n".join([*lines, "}"])


MULTIPLY_NEEDS = "=&f," * 4 + "r," * 10 + "f,f,f,f"


def zero_codes(kind: str) -> str:
    """The same as `multiply` for a word whose codes are all 0 (stored as 1)."""
    lines = ["{ .reg .b32 a<4>;"]
    lines += [f"mov.f32 ${i}, ${12 + i};" for i in range(4)]
    for step in range(4):
        for half in range(2):
            _, bit = _PLACES[kind][2 * step + half]
            value = _both(_power(kind, bit) | 1 << bit)
            lines += [f"mov.b32 a{2 * half + row}, {value:#x};" for row in range(2)]
        lines.append(_mma(kind, f"${4 + 2 * step}", f"${5 + 2 * step}"))
    return "\n".join([*lines, "}"])


ZERO_CODES_NEEDS = "=&f," * 4 + "r," * 8 + "f,f,f,f"


def unpack_quarter(kind: str) -> str:
    """Four of the 16 codes of a word as 16-bit numbers −¼, 0, ¼: those a lane of wgmma needs.

    Operands: the numbers of codes 2q, 2q + 1, 2q + 8 and 2q + 9; the word; 4q. Neighbours share a
    register, so the half of the word they lie in is doubled: they are the bits 0 and 18 on.
    """
    low, high = _power(kind, 0), _power(kind, 2)
    lines = ["{ .reg .b32 s, h0, h1, p, o;", f"mov.b32 p, {high << 16 | low:#x};"]
    lines.append(f"mov.b32 o, {(high | 4) << 16 | low | 1:#x};")
    lines.append("shr.u32 s, $4, $5;")
    for half, bytes_of_half in enumerate(("0x1010", "0x3232")):
        lines.append(f"prmt.b32 h{half}, s, s, {bytes_of_half};")
        lines.append(f"lop3.b32 h{half}, h{half}, 0xc0003, p, 0xEA;")
        lines.append(f"sub.{kind}x2 h{half}, h{half}, o;")
        lines.append(f"mov.b32 {{${2 * half}, ${2 * half + 1}}}, h{half};")
    return "\n".join([*lines, "}"])


UNPACK_QUARTER_NEEDS = "=h,=h,=h,=h,r,r"


def _power(kind: str, bit: int) -> int:
    """The bits of 2^(top − bit), above which a code counts a quarter."""
    mantissa = _MANTISSA[kind]
    return _ONE[kind] + ((mantissa - 2 - bit) << mantissa)


def _both(half: int) -> int:
    return half << 16 | half


def _mma(kind: str, low: str, high: str) -> str:
    sums = "{$0, $1, $2, $3}"
    name = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    return f"{name} {sums}, {{a0, a1, a2, a3}}, {{{low}, {high}}}, {sums};"

"""The problems of `bench_attention.py`, with their data, who takes part, and the truth."""

from collections.abc import Sequence
from typing import Any

import torch
from attention_peers import Call, Method, Problem
from harness import errors
from torch import Tensor

WIDTH_IN_ALL = 2048
TOKENS = 16384
PARTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


def problem(length: int, width: int, causal: bool, share: int = 1) -> Problem:
    heads = WIDTH_IN_ALL // width
    return Problem(max(1, TOKENS // length), heads, heads // share, length, width, causal)


def cases(only: str | None, quick: bool) -> list[tuple[str, Problem]]:
    """The most important first."""

    def some(ways: Sequence[str], lengths: Sequence[int], width: int) -> list[tuple[str, Problem]]:
        masks = (True, False)
        return [(w, problem(n, width, c)) for n in lengths for w in ways for c in masks]

    both = ["forward", "backward"]
    grouped = [(way, problem(8192, 128, True, share=8)) for way in both]
    listed = some(both, [16384, 4096], 128) + some(both, [16384], 64) + grouped
    if not quick:
        listed += some(both, [4096], 64) + some(both, [8192], 128) + some(["forward"], [8192], 64)
        listed += some(["forward"], [32768], 128) + some(both, [512, 1024, 2048], 128)
        listed += some(["forward"], [1024, 512, 2048, 32768], 64)
        listed += some(["backward"], [8192, 2048, 1024, 512], 64)
        listed += some(["backward"], [32768], 128) + some(["backward"], [32768], 64)
    return [(way, one) for way, one in listed if only in (None, way)]


class Case:
    """One problem and one direction, with data that its contenders share."""

    def __init__(
        self, way: str, one: Problem, device: str = "cuda", *, outliers: bool = False
    ) -> None:
        self.way, self.problem, self.device, self.outliers = way, one, device, outliers
        self.name = f"{way} {one.name}{' outliers' if outliers else ''}"
        self.flops = one.flops if way == "forward" else one.flops * 5 // 2
        self.drawn: dict[int, tuple[Tensor, ...]] = {}

    def call(self, method: Method, number: int) -> Call:
        if number not in self.drawn:
            self.drawn[number] = self.problem.draw(number, self.device, outliers=self.outliers)
        q, k, v, dout = self.drawn[number]
        made = getattr(method, self.way)
        given = (q, k, v) if self.way == "forward" else (q, k, v, dout)
        call: Call = made(self.problem, *given)
        return call

    def able(
        self, found: Sequence[Method], longest_exact: int = TOKENS
    ) -> tuple[list[Method], dict[str, str], dict[str, Any]]:
        """Who takes part, why others do not, and how wrong each is."""
        candidates = [m for m in found if getattr(m, self.way) and m.takes(self.way, self.problem)]
        taking, refused, answers = [], {}, {}
        for method in candidates:
            try:
                answers[method.name] = self.first_head(self.call(method, 0)())
                taking.append(method)
            except Exception as error:  # a peer's limits are many, and each is worth a line
                refused[method.name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if self.problem.length > longest_exact or not answers:
            return taking, refused, {}
        return taking, refused, self.errors(answers)

    def errors(self, answers: dict[str, list[Tensor]], number: int = 0) -> dict[str, Any]:
        """Of each answer to data set `number`, part by part."""
        exact = self.first_head(exactly(self.problem, self.way, *self.drawn[number]))
        return {
            name: {
                part: errors(got, want)
                for part, got, want in zip(PARTS[self.way], answer, exact, strict=True)
            }
            for name, answer in answers.items()
        }

    def first_head(self, answer: Any) -> list[Tensor]:
        """The answer's parts for the first sequence and the first key/value head."""
        parts = [answer] if isinstance(answer, Tensor) else list(answer)
        parts = parts[: len(PARTS[self.way])]
        share = self.problem.heads // self.problem.groups
        widths = {"out": share, "dq": share, "dk": 1, "dv": 1}
        return [
            part[0, : widths[name]].detach().clone()
            for name, part in zip(PARTS[self.way], parts, strict=True)
        ]


def exactly(one: Problem, way: str, *drawn: Tensor) -> list[Tensor]:
    """Float64, with the whole score matrix, of one sequence and one key/value head."""
    share = one.heads // one.groups
    q, k, v, dout = (x[:1, :n].double() for x, n in zip(drawn, (share, 1, 1, share), strict=True))
    scores = (q @ k.mT).mul_(one.scale)
    if one.causal:
        index = torch.arange(one.length, device=q.device)
        scores.masked_fill_(index > index[:, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    out = weights @ v
    if way == "forward":
        return [out]
    dscores = dout @ v.mT
    dscores = dscores.sub_((dout * out).sum(-1, keepdim=True)).mul_(weights)
    dk = (dscores.mT @ q).sum(1, keepdim=True) * one.scale
    return [dscores @ k * one.scale, dk, (weights.mT @ dout).sum(1, keepdim=True)]

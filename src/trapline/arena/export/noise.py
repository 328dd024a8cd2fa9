"""How noisy a reward is: the share of known bugs that would get full reward.

A mutant is the gold solution with one bug. Named mutants carry the bug of one trap, mechanical ones
a changed operator or constant. A mutant that fails no check would be rewarded like a right answer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from pydantic import TypeAdapter

from trapline.arena.certify.certify import PUBLISHED_CERTIFICATES, Certificate
from trapline.arena.challenge import Challenge

#: One-sided confidence of the bound on the share.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Noise:
    mutants: int
    #: Mutants that no check kills; mutants that are equivalent to a right answer do not count.
    survivors: int

    @property
    def share(self) -> float:
        return self.survivors / self.mutants

    @property
    def bound(self) -> float:
        """The 95 % upper bound (Clopper-Pearson), as if the mutants were a sample of all bugs."""
        from scipy.stats import beta

        if self.survivors == self.mutants:
            return 1.0
        return float(beta.ppf(CONFIDENCE, self.survivors + 1, self.mutants - self.survivors))

    def sentence(self) -> str:
        return (
            f"{self.survivors} of {self.mutants} mutants would get full reward "
            f"({self.share:.1%}; at most {self.bound:.1%} with 95 % confidence)"
        )


def reward_noise(challenge: Challenge, *, checks_only: bool) -> Noise:
    """The noise of the whole grade, or of a reward that leaves out the slow checks."""
    left_out = challenge.left_out_of_quick if checks_only else frozenset()
    named = [bool(fails - left_out) for fails in challenge.fault_dictionary.values()]
    mechanical = [
        outcome.fell_to != "" and outcome.fell_to not in left_out
        for certificate in published_certificates()
        if certificate.challenge == challenge.id
        # The slow checks come last: what fell to one of them passed all others.
        for outcome in certificate.of("mechanical")
        if outcome.subject not in challenge.equivalent
    ]
    killed = [*named, *mechanical]
    return Noise(len(killed), killed.count(False))


def noise_list(challenges: Iterable[Challenge]) -> str:
    """A Markdown list with the noise of the quick reward of each."""
    noises = {one.id: reward_noise(one, checks_only=True) for one in challenges}
    return "\n".join(f"- `{name}`: {noise.sentence()}" for name, noise in noises.items())


@cache
def published_certificates() -> list[Certificate]:
    """The certificates that ship with this version."""
    found = TypeAdapter(dict[str, list[Certificate]]).validate_json(
        PUBLISHED_CERTIFICATES.read_text(encoding="utf-8")
    )
    return found["certificates"]

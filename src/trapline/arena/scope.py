"""What a prompt asked for: the part of a contract that an answer is judged by."""

from dataclasses import dataclass

#: The capability of refusing bad input; every check of the dimension `robustness` needs it.
REFUSALS = "refusals"


@dataclass(frozen=True)
class Scope:
    """Capabilities that were asked for, and the error that the prompt allows.

    A check may narrow its situation to the scope, for example to equal lengths. A check that needs
    a capability outside the scope is not asked.
    """

    #: None: the whole contract.
    capabilities: frozenset[str] | None = None
    #: Relative error that counts as right although a careful answer is closer.
    tolerance: float = 0.0

    def has(self, capability: str) -> bool:
        return self.capabilities is None or capability in self.capabilities


WHOLE = Scope()

"""How an invariant of a simulated cluster is stated."""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant does not hold."""


def require(holds: object, what: str) -> None:
    if not holds:
        raise Violation(what)

"""Which links a new formation needs and which it does not: pure, and the same on both sides of each link."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from everstep.core.formation import Formation, Seat


def dials(me: str, other: str) -> bool:
    """Whether this side opens the connections between two workers. Roles change from epoch to epoch, names do not."""
    return me < other


def missing(me: str, have: Collection[str], formation: Formation) -> tuple[Seat, ...]:
    """Seats that need a link, where there are links to the workers `have`."""
    return tuple(seat for seat in formation.seats if seat.worker != me and seat.worker not in have)


def leaving(have: Mapping[str, int], formation: Formation) -> set[str]:
    """Workers whose links end at the switch to a formation. `have`: worker -> the newest epoch its link was wanted for.

    A link that was opened for a later epoch stays: that one is being prepared.
    """
    seated = {seat.worker for seat in formation.seats}
    return {worker for worker, epoch in have.items() if worker not in seated and epoch <= formation.epoch}

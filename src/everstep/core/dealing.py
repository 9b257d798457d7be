"""Which samples the committed steps consumed, as the few facts from which anybody can compute their numbers.

The order of samples and every member's share are pure functions (`data.sampler`) of a stream, the step, the number of
members and the role. So what a run consumed is told by where these change, however many steps lie between.
"""

from __future__ import annotations

import msgspec

RECENT = 4  # dealings that a session tells at once: more cannot pass unheard while a controller is replaced


class Stream(msgspec.Struct, frozen=True):
    """A data set in an order: with these arguments `data.sampler.Sampler` deals the same samples again."""

    num_samples: int
    global_batch: int
    seed: str  # decimal: it may have any size
    shuffle: bool
    drop_last: bool


class Dealing(msgspec.Struct, frozen=True):
    """How committed steps were dealt, from `first_step` to the first step of the next dealing.

    `epoch`, `num_members`: of the formation in which the gradients were made; a step that was rolled forward in a later
    one belongs to the earlier. `streams`: in the order in which a step takes from them; none: the data is the script's.
    """

    epoch: int
    num_members: int
    first_step: int
    streams: tuple[Stream, ...] = ()

"""Amounts as people read them: accelerators' time, money, shares, and moments on the wall clock."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

HOUR_S, DAY_S = 3600.0, 86400.0
FEW_S = 600.0  # accelerator-seconds below this are not said in hours
EARLIEST_S = 1e8  # wall clock times before this (1973) are a simulation's


class Price(msgspec.Struct, frozen=True):
    """What an accelerator costs in an hour. 0: not known, and no money is told."""

    per_hour: float = 0.0
    currency: str = "USD"

    def of(self, accelerator_s: float) -> float:
        return accelerator_s / HOUR_S * self.per_hour


def accelerator_time(seconds: float) -> str:
    """ "4.4 accelerator-seconds", "1,240 accelerator-hours"; "-" for a negative (unknown) amount."""
    if seconds < 0:
        return "-"
    if seconds < FEW_S:
        return f"{three_digits(seconds)} accelerator-seconds"
    return f"{three_digits(seconds / HOUR_S)} accelerator-hours"


class Unit(msgspec.Struct, frozen=True):
    """For a column of amounts: its head says the unit once."""

    name: str
    seconds: float

    def __call__(self, accelerator_s: float) -> str:
        return three_digits(accelerator_s / self.seconds)


def unit_for(total_s: float) -> Unit:
    """The unit in which this total, and its parts, read well."""
    return Unit("accelerator-hours", HOUR_S) if total_s >= 10 * HOUR_S else Unit("accelerator-seconds", 1.0)


def short_time(accelerator_s: float) -> str:
    """ "4.40 acc-s", "1,240 acc-h": for a narrow column."""
    return accelerator_time(accelerator_s).replace("accelerator-seconds", "acc-s").replace("accelerator-hours", "acc-h")


def three_digits(value: float) -> str:
    """At least three digits that count, no exponent; digits before the point are all shown."""
    if value == 0:
        return "0"
    size = abs(value)
    places = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.0995 else 3 if size >= 0.00995 else 4
    return f"{value:,.{places}f}"


def money(price: Price, accelerator_s: float) -> str:
    """Empty without a price."""
    if not price.per_hour:
        return ""
    amount = price.of(accelerator_s)
    if 0 < amount < 0.005:
        return f"less than 0.01 {price.currency}"
    return f"{_sum(amount)} {price.currency}"


def bare_money(price: Price, accelerator_s: float) -> str:
    """The same for a column that names the currency in its head."""
    amount = price.of(accelerator_s)
    return "<0.01" if 0 < amount < 0.005 else _sum(amount)


def _sum(amount: float) -> str:
    return f"{amount:,.{2 if amount < 1000 else 0}f}"


def percent(share: float) -> str:
    """ "93.1 %"; small shares keep a digit that counts, and nothing lost is not the same as little lost."""
    if share == 0 or share >= 0.0995:
        return f"{share * 100:.1f} %"
    if share < 0.0001:
        return "below 0.01 %"
    return f"{share * 100:.2f} %"


def moment(wall_s: float) -> str:
    """ "2026-11-30 10:47:22 UTC"; empty where nobody's clock was asked, as in a simulation."""
    return f"{datetime.fromtimestamp(wall_s, UTC):%Y-%m-%d %H:%M:%S} UTC" if wall_s > EARLIEST_S else ""


def plural(count: int, word: str, many: str = "") -> str:
    return f"{count:,} {word if count == 1 else many or word + 's'}"

"""Of ticks one in ten seconds stays, and all that are near to what changed the job."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.control.compaction import EVERY_S, NEAR_S, RARE_S, ROUTINE, TICKS, Line, compact

KINDS = ("StepsSeen", "MetricsSeen", "WorkersSeen", "LoadSeen", "NodeReported", "IncidentOpened", "Ticked")


def lines(*told: tuple[str, float]) -> list[Line]:
    return [Line(kind, t_s, str(number).encode()) for number, (kind, t_s) in enumerate(told)]


def kept(told: list[Line]) -> list[tuple[str, float]]:
    return [(line.kind, line.t_s) for line in compact(told)]


def test_a_day_without_events() -> None:
    stays = kept(lines(*(("StepsSeen", float(second)) for second in range(86400))))
    assert len(stays) <= 86400 / EVERY_S + 2 * NEAR_S + 2
    assert stays[0][1] == 0 and stays[-1][1] == 86399
    assert max(b - a for (_, a), (_, b) in zip(stays, stays[1:], strict=False)) <= EVERY_S


def test_around_an_incident_nothing_goes() -> None:
    ticks = [("StepsSeen", float(second)) for second in range(1000)]
    told = [*ticks[:500], ("NodeReported", 499.5), ("IncidentOpened", 499.6), *ticks[500:]]
    stays = kept(lines(*told))
    near = [tick for tick in told if abs(tick[1] - 499.6) <= NEAR_S]
    assert [each for each in stays if abs(each[1] - 499.6) <= NEAR_S] == near and len(stays) < 400


def test_the_last_step_before_a_hang_stays_however_long_ago_it_was() -> None:
    told = [("StepsSeen", 100 + second / 2) for second in range(200)]
    stays = kept(lines(("EpochFormed", 0.0), *told, ("IncidentOpened", 1000.0), ("JobEnded", 2000.0)))
    assert told[-1] in stays and told[0] in stays and len(stays) < 30


def test_of_long_ones_fewer_stay_but_for_what_changes_the_job() -> None:
    told = [("LoadSeen", float(second)) for second in range(0, 20_000, 200)]
    stays = kept(lines(*told[:50], ("IncidentOpened", 9850.0), *told[50:]))
    assert [t_s for kind, t_s in stays if kind == "LoadSeen"] == [0, RARE_S["LoadSeen"], 9800, 10_000, 17_200, 19_800]


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0, 40)), max_size=60))
def test_what_stays(gaps: list[tuple[str, float]]) -> None:
    now, told = 0.0, []
    for kind, gap in gaps:
        now += gap
        told.append((kind, now))
    whole = lines(*told)
    stays = list(compact(whole))
    assert [line.data for line in stays] == sorted((line.data for line in stays), key=int), "in order"
    assert {line.data for line in whole if line.kind not in TICKS} <= {line.data for line in stays}
    assert stays[:1] == whole[:1] and stays[-1:] == whole[-1:]
    data = {line.data for line in stays}
    for kind in TICKS:
        mine = [line for line in whole if line.kind == kind]
        gone = [line for line in mine if line.data not in data]
        for line in gone:
            every_s = RARE_S.get(kind, EVERY_S)
            before = [other for other in mine if other.data in data and 0 <= line.t_s - other.t_s <= every_s]
            assert before, "one of its kind stays within the time before it"
            changes = [each.t_s for each in whole if each.kind not in TICKS and each.kind not in ROUTINE]
            assert all(abs(line.t_s - t_s) > NEAR_S for t_s in changes)

"""Views of three jobs for the page's tests: a small one with faults, one of 1,000 workers, a simulation of 100,000."""

from __future__ import annotations

import math
import random

import msgspec

from everstep.core.decisions import Action, Alternative
from everstep.core.load import DeviceLoad, NodeLoad
from everstep.core.sampled import Function, Sampled, Stack
from everstep.core.types import Blame, Verdict
from everstep.observe.flame import Picture, picture
from everstep.observe.view import (
    AlertView,
    Bucket,
    EpochView,
    Fleet,
    IncidentView,
    Moment,
    NodeState,
    NodeView,
    SaveView,
    Series,
    View,
    Workers,
    WorkerState,
)

STARTED_WALL_S = 1_790_000_000.0
STEP_S = 0.412
Spans = list[tuple[float, float]]  # of time without a step


def curve(every_s: float, values: list[float | None], spread: float = 0.03) -> Series:
    """A series whose bins reach from a little below to a little above their mean."""
    low = [None if y is None else y * (1 - spread) for y in values]
    high = [None if y is None else y * (1 + spread) for y in values]
    return Series(every_s, values, low, high)


def curves(span_s: float, bins: int, members: int, holes: Spans, seed: int = 1) -> dict[str, Series]:
    """Loss, learning rate, throughput, step time and members of a job that made no step in `holes`."""
    chance, every_s = random.Random(seed), span_s / bins
    times = [(i + 0.5) * every_s for i in range(bins)]
    quiet = [any(begin <= at < end for begin, end in holes) for at in times]
    slower = [1 + 0.04 * chance.random() for _ in times]

    def where_steps(values: list[float]) -> list[float | None]:
        return [None if hole else y for hole, y in zip(quiet, values, strict=True)]

    loss = [2.1 + 8.3 * math.exp(-6 * at / span_s) + 0.06 * chance.gauss(0, 1) for at in times]
    rate = [3e-4 * (1 + math.cos(math.pi * at / span_s)) / 2 for at in times]
    return {
        "metric:loss": curve(every_s, where_steps(loss)),
        "metric:lr": curve(every_s, where_steps(rate), 0),
        "step_s": curve(every_s, where_steps([STEP_S * x for x in slower])),
        "steps_per_s": curve(every_s, [0.0 if q else 1 / STEP_S / x for q, x in zip(quiet, slower, strict=True)]),
        "members": curve(every_s, [float(members) for _ in times], 0),
        "ettr": curve(every_s, [min(0.99, 0.6 + 0.39 * (1 - math.exp(-8 * at / span_s))) for at in times], 0),
    }


def shares(span_s: float, bins: int, holes: Spans) -> dict[str, Series]:
    """Where the time went, by bin: nearly all of it to steps, but for `holes`."""
    every_s = span_s / bins
    quiet = [any(begin <= (i + 0.5) * every_s < end for begin, end in holes) for i in range(bins)]
    by_bucket = {
        Bucket.PRODUCTIVE: [0.2 if hole else 0.976 for hole in quiet],
        Bucket.STALL: [0.004] * bins,
        Bucket.STRAGGLER: [0.0 if hole else 0.012 for hole in quiet],
        Bucket.STANDBY: [0.008] * bins,
        Bucket.DETECTION: [0.2 if hole else 0.0 for hole in quiet],
        Bucket.RECOVERY: [0.588 if hole else 0.0 for hole in quiet],
    }
    return {bucket.value: Series(every_s, list(values)) for bucket, values in by_bucket.items()}


def kill(number: int = 1, at_s: float = 121.3, *, is_open: bool = False) -> IncidentView:
    """A worker was killed; the three others went on, and a new process joined them."""
    blame = Blame(3, "node2", "signal", "SIGKILL, sent by nobody of this job")
    found = IncidentView(
        id=f"i{number}", kind="crash", epoch=number, opened_s=at_s, culprits=(blame,), step=290,
        why="rank 3 on node2 was killed by SIGKILL; the kernel's memory killer did not do it",
        first_sign_s=at_s - 0.004, told_s=at_s + 0.007,
        timeline=[
            Moment(at_s - 0.004, "sign", "rank 3 (process 20411) was killed by SIGKILL"),
            Moment(at_s, "detect", "node2's agent saw its lock given up"),
            Moment(at_s + 0.002, "decide", "shrink: 3 of 4 members hold all state"),
            Moment(at_s + 0.007, "act", "ranks 0, 1 and 2 were told, and dropped the step"),
        ],
    )  # fmt: skip
    return found if is_open else closed(found)


def closed(incident: IncidentView) -> IncidentView:
    """The same, recovered, with all that was found and weighed."""
    at_s = incident.opened_s
    return msgspec.structs.replace(
        incident, outcome="recovered", closed_s=at_s + 0.61, downtime_s=0.61,
        phases={"detect": 0.004, "stop": 0.041, "form": 0.155, "first-step": 0.41},
        answer="shrink", answer_loss_s=1.9, answer_why="the others hold all state and go on with the interrupted step",
        alternatives=(
            Alternative(Action.RESPAWN, 14.2, "3.5 s until a new process on node2 has loaded its libraries"),
            Alternative(Action.ROLL_BACK, 41.0, "12 steps since the newest copy"),
            Alternative(Action.PROMOTE, -1, "no standby is here"),
            Alternative(Action.EVICT, -1, "it is the first fault of node2"),
        ),
        cause=Verdict("killed", incident.culprits, "SIGKILL from outside of the job", 0.93),
        evidence=(("log", Verdict("log", incident.culprits, "its log ends in the middle of a line", 0.4)),),
        files=(f"incidents/{incident.id}/node2-rank3.log", f"incidents/{incident.id}/stacks.txt"),
        timeline=[
            *incident.timeline,
            Moment(at_s + 0.2, "recover", "formation 2 of 3 members: 6 links kept, none new"),
            Moment(at_s + 0.61, "recover", "first step of the new formation"),
            Moment(at_s + 0.61, "close", "recovered after 0.61 s without a step"),
        ],
        cost={"detection": 0.016, "recovery": 2.4},
    )  # fmt: skip


def hang(at_s: float = 300.0) -> IncidentView:
    blame = Blame(1, "node1", "collective", "stands in all_reduce of step 712, which rank 1 never entered")
    return IncidentView(
        id="i2", kind="hang", epoch=3, opened_s=at_s, culprits=(blame,), why="no step for 31 s; rank 1 does not move",
        collateral=tuple(Blame(rank, f"node{rank // 2 + 1}", "waits") for rank in (0, 2, 3)), step=711,
        first_sign_s=at_s - 31, told_s=at_s + 0.4, closed_s=at_s + 6.2, outcome="recovered", downtime_s=37.2,
        phases={"detect": 31.0, "stop": 2.1, "form": 1.6, "first-step": 2.5}, redone_steps=4, answer="roll-back",
        answer_loss_s=20.1, answer_why="rank 1 cannot be asked, so its state comes from a copy",
        files=("incidents/i2/stacks.txt",), cost={"detection": 124.0, "recovery": 24.8, "redone work": 6.6},
        timeline=[Moment(at_s - 31, "sign", "last step, 711"), Moment(at_s, "detect", "hang of rank 1")],
    )  # fmt: skip


def sampled() -> Sampled:
    """Three quarters of the time in a forward pass, and the rest in reading data and waiting for the others."""
    functions = (
        Function("<module>", "train.py", 1, "script"),
        Function("train_one_step", "train.py", 30, "script"),
        Function("Module._wrapped_call_impl", "torch/nn/modules/module.py", 1770, "torch"),
        Function("Attention.forward", "model.py", 41, "script"),
        Function("scaled_dot_product_attention", "torch/nn/functional.py", 5800, "torch"),
        Function("Batches.__iter__", "everstep/data/batches.py", 77, "everstep"),
        Function("default_collate", "torch/utils/data/_utils/collate.py", 212, "torch"),
        Function("Fabric.wait", "everstep/comms/work.py", 90, "everstep"),
        Function("<lambda>", "json/decoder.py", 3, "library"),
    )
    stacks = (
        Stack("MainThread", (0, 1, 2, 3, 4), 5812, 2_700_000_000),
        Stack("MainThread", (0, 1, 2, 3), 44, 1_050_000_000),
        Stack("MainThread", (0, 5, 6), 220, 600_000_000),
        Stack("MainThread", (0, 5, 8), 3, 50_000_000),
        Stack("MainThread", (0, 1, 7), 93, 600_000_000),
    )
    return Sampled(functions, stacks, 480, 5.0, 0.4, 0.03)


def shown() -> Picture:
    return picture(sampled())


def slow(at_s: float = 520.0) -> IncidentView:
    blame = Blame(2, "node2", "forward", "its forward pass takes 1.5 times the median since step 1,190")
    return IncidentView(
        id="i3", kind="slow", epoch=4, opened_s=at_s, culprits=(blame,), why=blame.detail, answer="leave-it",
        answer_why="waiting costs less than a change", answer_loss_s=38.0, outcome="cleared", closed_s=at_s + 44,
        cost={"straggler loss": 61.0}, step=1190,
    )  # fmt: skip


def small(span_s: float = 740.0) -> View:
    """Four workers on two nodes: a kill, a hang, a slow worker, then a drain answered by a standby's promotion."""
    holes = [(0.0, 4.0), (121.3, 121.9), (269.0, 306.2)]
    incidents = [kill(), hang(), slow()]
    return View(
        job="gpt-small", script="examples/train_gpt_session.py", submitted_wall_s=STARTED_WALL_S, now_s=span_s,
        stage="running", epoch=6, restarts=5, step=1690, goal=3000, steps=1694, redone_steps=4, step_s=STEP_S,
        last_step_s=span_s - 0.2, metrics={"loss": 2.347, "lr": 2.1e-4},
        nodes=[
            NodeView("node1", address="127.0.0.1", slots=2, first_rank=0),
            NodeView("node2", NodeState.LEAVING, "drained", 702.0, "127.0.0.2", 2, -1, 2),
            NodeView("node3", address="127.0.0.3", slots=2, first_rank=2, since_s=1.4),
        ],
        workers=Workers(
            nodes=[0, 0, 2, 2], locals=[0, 1, 0, 1], lives=[0, 1, 0, 0],
            states=[WorkerState.ACTS, WorkerState.ACTS, WorkerState.ACTS, WorkerState.WARMS],
            roles=[0, 1, 2, 3], own_s=[0.301, 0.307, 0.372, -1],
            rss_bytes=[1 << 30, 1 << 30, 1_210_000_000, 900_000_000],
        ),
        loads={
            "node1": NodeLoad(390, 8, 5_300, 33_500, 9_000, 16_800, 120, 95, (98, 171)),
            "node3": NodeLoad(210, 8, 1_200, 33_500, 16_000, 16_800, 0, 2_400, (100, 104)),
        },
        fleet=Fleet(4, 4, 0, 0, 0), incidents=incidents, num_incidents=3, by_kind={"crash": 1, "hang": 1, "slow": 1},
        by_cause={"signal": 1, "collective": 1, "forward": 1}, downtime_s=37.81,
        saves=[SaveView(step, step * 0.43, step * 0.43 + 1.3) for step in range(200, 1600, 200)]
        + [SaveView(1600, 690.0, -1.0, "no space left on device")],
        num_saves=7, saved_step=1400, saves_failed=1, memory_steps={"0": 1690, "1": 1690, "2": 1690, "3": 1688},
        epochs=[
            EpochView(1, 1.2, 4, ("node1", "node2"), (), -1, -1, 4.0, "the job's start"),
            EpochView(2, 121.5, 3, (), ("rank 3",), 6, 0, 121.9, "crash of rank 3"),
            EpochView(3, 128.0, 4, ("rank 3",), (), 6, 6, 128.4, "a new process came"),
            EpochView(4, 304.1, 4, (), (), 0, 12, 306.2, "hang of rank 1"),
            EpochView(5, 702.3, 4, ("node3",), ("node2",), 2, 10, 702.7, "node2 is drained"),
            EpochView(6, 716.0, 4, ("standby of node3",), (), 6, 6, 716.5, "a standby was promoted"),
        ],
        alerts=[AlertView(690.8, "save-failed", "the save of step 1,600 failed: no space left on device")],
        buckets={
            "productive": 2612.0, "detection": 124.0, "recovery": 27.2, "redone work": 6.6, "checkpoint stall": 8.2,
            "start": 16.0, "waiting for capacity": 12.0, "idle standby": 93.0, "straggler loss": 61.0,
        },
        costs={"collective": 155.4, "forward": 61.0, "signal": 2.4}, ettr=0.9412,
        series=curves(span_s, 740, 4, holes), bucket_series=shares(span_s, 740, holes), redone=[(306.2, 308.1)],
    )  # fmt: skip


def large(workers: int = 1000) -> View:
    """125 nodes of eight, three days, 180 incidents."""
    chance, span_s = random.Random(2), 3 * 86400.0
    own = [0.301 * (1 + 0.05 * chance.random() + (0.5 if rank in (217, 700) else 0)) for rank in range(workers)]
    states = [int(WorkerState.ACTS)] * workers
    states[217], states[503], states[504] = WorkerState.SLOW, WorkerState.STOPPED, WorkerState.GONE
    states[-8:] = [WorkerState.WAITS] * 8
    nodes = [NodeView(f"gpu-a{i:03d}.cluster", slots=8, first_rank=8 * i) for i in range(workers // 8)]
    nodes[-1] = NodeView(nodes[-1].name, NodeState.SPARE, slots=8)
    nodes += [NodeView(f"gpu-b{i:03d}.cluster", NodeState.LOST, "closed", 3600.0 * i, slots=8) for i in range(24)]
    made = [many_kinds(i, span_s * (i + 0.5) / 180) for i in range(180)]
    view = small(span_s)
    return msgspec.structs.replace(
        view, job="llm-70b", step=612_345, goal=1_000_000, steps=613_001, redone_steps=656, epoch=214, restarts=213,
        loads={node.name: busy(chance) for node in nodes if node.state is not NodeState.LOST},
        nodes=nodes, fleet=Fleet(workers, workers - 10, 8, 2, 1), incidents=made, num_incidents=431,
        by_kind={"crash": 201, "hang": 41, "slow": 120, "node-lost": 69}, downtime_s=4210.0, ettr=0.9834,
        workers=Workers(
            [rank // 8 for rank in range(workers)], [rank % 8 for rank in range(workers)], [0] * workers, states,
            list(range(workers)), own, [int(9e9)] * workers,
        ),
        series=curves(span_s, 1000, workers - 10, [(i.opened_s, i.opened_s + 300) for i in made[::40]], 3),
        bucket_series=shares(span_s, 1000, [(i.opened_s, i.opened_s + 300) for i in made[::40]]),
        memory_steps={str(role): 612_345 - (role == 217) for role in range(workers - 10)},
        buckets=scaled(view, workers * span_s), redone=[(90_000.0, 91_500.0)],
        costs={"signal": 9.1e6, "device-memory": 4.2e6, "network": 3e6, "forward": 2e6, "disk": 1e5, "host": 9e4},
    )  # fmt: skip


def busy(chance: random.Random) -> NodeLoad:
    """Of eight workers, each with a device."""
    workers = tuple(chance.randrange(90, 400) for _ in range(8))
    devices = tuple(DeviceLoad(chance.randrange(60, 100), 83, chance.randrange(55, 75)) for _ in workers)
    machine = (sum(workers) + 300, 192, chance.randrange(20_000, 1_500_000), 2_027_000, 900_000, 1_013_500)
    return NodeLoad(*machine, 210_000, 190_000, workers, 85_899, devices)


def scaled(view: View, total_s: float) -> dict[str, float]:
    """The view's buckets, for a job that had so many accelerator-seconds."""
    now = sum(view.buckets.values())
    return {name: spent * total_s / now for name, spent in view.buckets.items()}


def many_kinds(number: int, at_s: float) -> IncidentView:
    made = [kill, hang, slow][number % 3](at_s=at_s)
    return msgspec.structs.replace(made, id=f"i{number + 252}")


def huge(total: int = 100_000) -> View:
    """A simulated year: accelerators are counted, and only those nodes have names which were culprits."""
    span_s = 365 * 86400.0
    view = large()
    made = [msgspec.structs.replace(i, opened_s=i.opened_s * 121) for i in view.incidents]
    return msgspec.structs.replace(
        view, job="year-100k", script="examples/scenarios/year-100k.toml", simulated=True, now_s=span_s,
        workers=Workers(), fleet=Fleet(total, 98_740, 640, 620, 3),
        nodes=[NodeView(f"n{i}", slots=8, incidents=1) for i in range(12)],
        loads={}, last_step_s=span_s - 40, incidents=made, memory_steps={}, redone=[],
        series=curves(span_s, 1000, 98_740, [], 4), bucket_series=shares(span_s, 1000, []),
        buckets=scaled(view, total * span_s), submitted_wall_s=0.0, step_s=31.0,
        costs={cause: s * 12_000 for cause, s in view.costs.items()},
    )  # fmt: skip

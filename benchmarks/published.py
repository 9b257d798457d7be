"""Scenarios of published results, from the inputs that were published with them. Used by benchmarks and tests."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import json
import random
from pathlib import Path
from typing import Any

from everstep.sim.engine import Engine
from everstep.sim.result import Result
from everstep.sim.scenario import build

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests/sim/data"
TRACES = ROOT / "examples/scenarios/traces"
DAY_S = 86400.0


def simulate(tree: dict[str, Any], traces: dict[str, str] | None = None, seed: int = 1) -> Result:
    scenario = build({"seed": seed, **tree}, "published")
    return Engine(scenario, random.Random(scenario.seed), None, traces).run()


# TrainMover (OSDI'26) ---------------------------------------------------------------------------------

# Downtime in seconds of each way to answer an interruption. It is the same for planned ones.
WAYS = {"trainmover": 26.6, "no standby": 59.2, "parcae": 221.0, "megatron": 300.0}
FAILURES = 6.5  # per 1000 node-days
PLANNED = FAILURES / 8.9  # interruptions that are no failures


def trainmover(nodes: int, way: str, interruptions: int) -> dict[str, Any]:
    """A run in which about so many interruptions are to be expected."""
    down_s = WAYS[way]
    days = interruptions / (nodes * (FAILURES + PLANNED) / 1000)
    strategy: dict[str, Any] = {"preset": "trainmover", "overlap": "queue", "loses": "nothing"}
    strategy["seconds"] = {"promote-standby": down_s, "evict-node": down_s, "process": down_s}
    return {
        "days": days,
        "cluster": {"nodes": nodes, "standbys": int(way == "trainmover"), "repair_s": 0.0},
        "job": {"replicas": 64, "step_s": 1.0},
        "failures": [
            {"kind": "exponential", "rate": FAILURES},
            {"kind": "maintenance", "rate": PLANNED, "lasts_s": 1e-6},
        ],
        "strategy": strategy,
    }


def per_week(result: Result, what: float) -> float:
    return what / (result.wall_s / (7 * DAY_S))


def interruptions(result: Result) -> int:
    return result.incidents.get("node-lost", 0) + result.incidents.get("drain", 0)


def waste_gpu_h(result: Result) -> float:
    """Accelerator-hours a week without a step, and of idle standbys."""
    spent = result.accelerator_s
    parts = ("detection", "recovery", "waiting for capacity", "idle standby")
    return per_week(result, sum(spent[name] for name in parts)) / 3600


def restarts(mttf_s: float, down_s: float, failures: int, nodes: int = 64) -> dict[str, Any]:
    """Every failure stops all for so long."""
    return {
        "duration_s": failures * mttf_s,
        "cluster": {"nodes": nodes, "standbys": 1, "repair_s": 0.0},
        "job": {"step_s": 1.0},
        "failures": [{"kind": "exponential", "rate": 1000 * DAY_S / (mttf_s * nodes)}],
        "saves": {},
        "strategy": {
            "preset": "restart", "overlap": "queue", "loses": "nothing",
            "seconds": {"restart-workers": down_s},
        },
    }  # fmt: skip


# FT-HSDP ----------------------------------------------------------------------------------------------


def ft_hsdp(shrinks: bool) -> dict[str, Any]:
    """98K accelerators, a failure every 18 minutes. Restart: 10 of them. Else 3, then 7 with 11 of 12 replicas."""
    strategy: dict[str, Any] = {"loses": "nothing", "preset": "restart", "seconds": {"restart-workers": 600}}
    if shrinks:
        strategy |= {"preset": "everstep", "actions": ["shrink", "grow"], "seconds": {"shrink": 180, "grow": 0}}
    return {
        "duration_s": 1080.0 * 1000,
        "cluster": {"nodes": 12288, "standbys": int(not shrinks), "repair_s": 600.0 if shrinks else 0.0},
        "job": {"replicas": 12, "min_replicas": 6, "step_s": 1.0},
        "failures": [{"kind": "periodic", "every_s": 1080}],
        "saves": {},
        "strategy": strategy,
    }


# ByteRobust (SOSP'25) ---------------------------------------------------------------------------------


def byterobust(machines: int, days: int) -> dict[str, Any]:
    """0.0012 failures a machine and day; how many a day are not exceeded in 99 of 100 days."""
    return {
        "days": float(days),
        "cluster": {"nodes": machines, "standbys": 4, "repair_s": 0.0},
        "job": {"step_s": 10.0},
        "failures": [{"kind": "exponential", "rate": 1.2}],
        "strategy": {"preset": "trainmover", "loses": "nothing"},
    }


# Oobleck's artifact (SOSP'23) -------------------------------------------------------------------------

PERIODS = ("6h", "3h", "1h", "30m", "10m")
# Key of the tables, samples a step, Oobleck's reconfiguration, Varuna's restart and save, Bamboo's rendezvous; seconds.
MODELS = {
    "BERT-large": ("bertLarge", 8192, 2.0, 76.0, 15.8, 76.0),
    "GPT-2-ours": ("gpt_2_ours", 1024, 2.0, 83.0, 11.5, 80.0),
    "GPT-3-6_7b": ("gpt_3_6_7b", 1024, 10.0, 701.0, 120.0, 450.0),  # does not fit with Bamboo's copies
}
# Varuna's restart of BERT-large by the nodes there were before it, as its artifact has it.
BERT_RESTART_S = {30: 71.3, 29: 67.6, 28: 67.6, 27: 49.1, 26: 112.0} | {
    n: 108.3 - 3.7 * (25 - n) for n in range(15, 26)
}


@functools.cache
def _json(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


@dataclasses.dataclass(order=True)
class _Queued:
    at_ms: int
    kind: int  # 1 added, 2 removed, 4 ready, 5 the rendezvous that the first one begins
    node: str = dataclasses.field(compare=False)


def _as_queued(text: str) -> tuple[str, list[str]]:
    """The trace with nodes in the order in which they are added, and their names as they are ready.

    In the artifact both happen to all at once, and the binary heap of its events has an order of its own for that. It
    tells who waits without a role, so whose loss a trace means."""
    kinds = {"add": 1, "remove": 2}
    queue: list[_Queued] = []
    for at, what, node in (line.split(",") for line in text.split()):
        heapq.heappush(queue, _Queued(int(at), kinds[what], node))
    heapq.heapify(queue)  # as the artifact does: it moves equal ones
    came: dict[int, list[str]] = {1: [], 4: []}
    while queue[0].kind != 5:
        event = heapq.heappop(queue)
        came[event.kind].append(event.node)
        if event.kind == 1:
            heapq.heappush(queue, _Queued(event.at_ms + 45_000, 4, event.node))
        elif len(came[4]) == 1:
            heapq.heappush(queue, _Queued(event.at_ms + 30_000, 5, ""))
    lines = [f"0,add,{node}" for node in came[1]] + [line for line in text.split() if not line.startswith("0,")]
    return "\n".join(lines), came[4]


def tears(losses: int) -> list[int]:
    """Which switches, each of them after a loss, make a save fail in the artifact.

    Of a save that begins it asks whether the end of it comes before any loss in the list of its binary heap of events:
    in that order, not by time. When a loss comes first the answer is right. When the switch comes first, the end moves
    up from the last place to just below it, to the left of the losses or to the right of them: right if the number of
    events (the switch, the end and the losses to come) begins with 11 in binary. When what comes first is the step that
    the switch cut off, that number is the same: either no loss has followed, or the switch that follows it waits too.
    """
    return [lost for lost in range(1, losses + 1) if f"{losses - lost + 2:b}".startswith("11")]


def oobleck_expected(model: str, name: str, period: str) -> float:
    return float(_json("oobleck_expected.json")["results"][model][name][f"traces/{period}.csv"])


def oobleck(model: str, name: str, period: str) -> tuple[dict[str, Any], dict[str, str]]:
    """A scenario and its trace. In the artifact nodes need 45 s to come, the job works on at its old pace until what
    follows is ready, times are whole milliseconds, Varuna's restart time holds the save that follows its first step, a
    save takes as long again until it counts, and one that fails takes ten steps back."""
    key, samples, reform_s, restart_s, save_s, rendezvous_s = MODELS[model]
    rates = _json("oobleck_throughput.json")["tables"][name].get(f"{key}_simulate_step_delta:tputs", [])
    rates = [samples / (int(samples / rate * 1000) / 1000) if rate else rate for rate in rates]  # steps of whole ms
    text = (TRACES / f"oobleck-{period}.csv").read_text(encoding="utf-8")
    until_s = max(int(line.split(",")[0]) for line in text.split()) / 1000 - 0.001  # its last removal is not played
    tree: dict[str, Any] = {
        "duration_s": until_s,
        "cluster": {"nodes": 30, "accelerators_per_node": 1},
        "job": {
            "law": "table", "samples_per_s": {str(30 - n): rate for n, rate in enumerate(rates)},
            "samples_per_step": samples, "stages": 2, "min_nodes": 15, "start_s": 45 + reform_s,
        },
        "failures": [{"kind": "trace", "file": "trace"}],
    }  # fmt: skip
    if name == "bamboo":
        text, tree["cluster"]["ready"] = _as_queued(text)
        tree["job"] |= {"start_s": 45 + 30.0, "pipeline_nodes": 12, "min_nodes": 12}
        tree["strategy"] = {
            "preset": "bamboo",
            "idle_slows": True,
            "seconds": {"take-over-by-redundancy": rendezvous_s},
        }
        return tree, {"trace": text}
    if name == "oobleck":
        tree["strategy"] = {"actions": ["re-partition-stages"], "seconds": {"re-partition-stages": reform_s}}
    else:
        tree["job"]["start_s"] = 45 + restart_s - save_s
        tree["strategy"] = {"actions": ["restart-workers"], "seconds": {"restart-workers": restart_s - save_s}}
        tree["saves"] = {
            "every_steps": 10, "stall_s": save_s, "durable_s": save_s, "after_restart": True, "aligned": True,
            "failed_undoes": 10,
        }  # fmt: skip
        tree["strategy"]["tears"] = tears(text.count("remove"))
        if model == "BERT-large":
            left = {str(n - 1): seconds - save_s for n, seconds in BERT_RESTART_S.items()}
            tree["strategy"]["seconds_by_nodes"] = {"restart-workers": left}
    tree["strategy"] |= {"preset": name, "meanwhile": True, "overlap": "stands"}
    return tree, {"trace": text}

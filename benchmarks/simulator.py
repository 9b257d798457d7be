"""The simulator against published results, and its own speed.

    python benchmarks/simulator.py [--quick | --full] [--json]

Every published number comes from a scenario with the inputs that were published beside it (benchmarks/published.py);
random ones from so many failures that their standard error is a part of the 1 % they must be within. --quick takes a
tenth of the failures, and lists what Oobleck's artifact says for two periods of five.
"""

from __future__ import annotations

import hashlib
import math
import random
import resource
import statistics
import time
import tomllib

import msgspec
import published as p
from harness import Claim, arguments, say, show

from everstep.core.events import AnyEvent, Entry
from everstep.sim.engine import Engine
from everstep.sim.result import Result
from everstep.sim.scenario import build
from everstep.sim.schedule import MAKERS
from everstep.sim.workload import Times, play

WITHIN = 0.01


def row(what: str, value: float, published: float, unit: str, within: float = WITHIN) -> Claim:
    off = value / published - 1 if published else value
    say(f"{what}: {value:.5g} {unit}, published {published:.5g} ({off:+.2%})")
    return Claim(what, value, unit, "published", published, None, f"within {within:.0%}", abs(off) <= within)


def trainmover(count: int) -> list[Claim]:
    claims = []
    runs: dict[tuple[int, str], Result] = {}

    def run(nodes: int, way: str) -> Result:
        if (nodes, way) not in runs:
            runs[nodes, way] = p.simulate(p.trainmover(nodes, way, count))
        return runs[nodes, way]

    def saved(nodes: int, way: str) -> float:
        return 1 - p.waste_gpu_h(run(nodes, "trainmover")) / p.waste_gpu_h(run(nodes, way))

    error = f"(standard error {1 / math.sqrt(count):.1%})"
    for nodes, label, expected in ((128, "1K", 6.5), (1024, "8K", 51.8), (8192, "64K", 414.6), (16384, "128K", 829.0)):
        got = p.per_week(run(nodes, "trainmover"), p.interruptions(run(nodes, "trainmover")))
        claims.append(row(f"TrainMover: interruptions a week at {label} {error}", got, expected, ""))
    for nodes, label, way, expected in (
        (1024, "8K", "no standby", 35.82),
        (1024, "8K", "parcae", 82.81),
        (16384, "128K", "no standby", 54.99),
        (16384, "128K", "parcae", 87.94),
        (8192, "64K", "megatron", 91.07),
    ):
        claims.append(row(f"TrainMover: waste saved at {label} against {way}", 100 * saved(nodes, way), expected, "%"))
    for way, expected in (("megatron", 2.06), ("parcae", 1.47)):
        less = p.waste_gpu_h(run(8192, way)) - p.waste_gpu_h(run(8192, "trainmover"))
        claims.append(
            row(f"TrainMover: GPU-h a week saved at 64K against {way} {error}", less / 1e6, expected, "million")
        )
    for label, minutes, expected in (("64K", 27.04, 16.47), ("128K", 14.0, 31.79)):
        result = p.simulate(p.restarts(60 * minutes, 60 * 4.45, count))
        claims.append(
            row(f"TrainMover: ETTR loss of restarts at {label} {error}", 100 * (1 - result.goodput), expected, "%")
        )
    return claims


def others(full: bool) -> list[Claim]:
    claims = []
    for shrinks, expected in ((False, 100 * 8 / 18), (True, 100 * (7 * 11 / 12 + 8) / 18)):
        how = "healthy replicas go on" if shrinks else "restart"
        claims.append(
            row(f"FT-HSDP: effective time, {how}", 100 * p.simulate(p.ft_hsdp(shrinks)).goodput, expected, "%")
        )
    for machines, expected in ((128, 2), (256, 2), (512, 3), (1024, 4)):
        days = 40_000_000 // machines // (1 if full else 5)
        result = p.simulate(p.byterobust(machines, days))
        what = f"ByteRobust: spares for 99 % of days at {machines} machines ({days} days)"
        claims.append(row(what, result.failures_quantile(0.99), expected, "", 0.0))
    for name, expected in (("varuna", 4.60), ("gpipe", 4.54)):
        times = Times(0.1, 0.2, 0.005, jitter_s=0.002, send_jitter_s=0.01)
        spans = [play(MAKERS[name](4, 8), times, random.Random(seed)).makespan_s + 0.3 for seed in range(200)]
        error = statistics.stdev(spans) / math.sqrt(len(spans))
        claims.append(row(f"step time of {name}, P 4, m 8 (+- {error:.3f})", statistics.mean(spans), expected, "s"))
    return claims


def artifact(periods: tuple[str, ...]) -> list[Claim]:
    claims = []
    for name in ("oobleck", "varuna", "bamboo"):
        for model in p.MODELS:
            if name == "bamboo" and model == "GPT-3-6_7b":
                continue  # the artifact says 0: out of memory
            for period in periods:
                result = p.simulate(*p.oobleck(model, name, period))
                expected = p.oobleck_expected(model, name, period)
                what = f"Oobleck's artifact: {name}, {model}, a node every {period}"
                claims.append(row(what, result.samples_per_s, expected, "samples/s"))
    return claims


DETECTED = [
    {"kind": "exponential", "rate": 6.5, "causes": "byterobust"},  # with hangs among them
    {"kind": "slow", "rate": 3.0},
    {"kind": "silent", "rate": 0.1},
]


def year(detected: bool = False) -> tuple[float, str, Result]:
    """Seconds of processor time of one core, with its journal; the journal's digest. `detected`: our own strategy, and
    faults that its detectors have to notice."""
    tree = tomllib.loads((p.ROOT / "examples/scenarios/year.toml").read_text(encoding="utf-8"))
    if detected:
        tree |= {"strategy": {"preset": "everstep"}, "failures": DETECTED}
    scenario = build(tree, "year.toml")
    digest, encoder, count = hashlib.sha256(), msgspec.json.Encoder(), 0

    def sink(now: float, epoch: int, event: AnyEvent) -> None:
        nonlocal count
        count += 1
        digest.update(encoder.encode(Entry(count, now, now, scenario.job.name, epoch, event)) + b"\n")

    began = time.process_time()
    result = Engine(scenario, random.Random(scenario.seed), sink).run()
    return time.process_time() - began, digest.hexdigest(), result


def speed() -> list[Claim]:
    (first_s, one, result), (second_s, other, _) = year(), year()
    (watched_s, three, watched), (_, four, _) = year(detected=True), year(detected=True)
    took_s = statistics.median((first_s, second_s))
    memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    what = f"a year of {result.accelerators} accelerators, {result.failures} failures, journalled"
    total = sum(result.accelerator_s.values()) / (result.wall_s * result.accelerators) - 1
    return [
        Claim(what, took_s, "s of one core", bar="< 10 s", holds=took_s < 10),
        Claim(
            f"the same with our detectors, {watched.failures} faults",
            watched_s,
            "s of one core",
            bar="< 10 s",
            holds=watched_s < 10 and three == four,
        ),
        Claim("its memory", memory_gb, "GB", bar="< 1 GB", holds=memory_gb < 1),
        Claim("same seed, same bytes of the journal", float(one == other), "", bar="1", holds=one == other),
        Claim("buckets against wall time", 100 * abs(total), "%", bar="<= 0.1 %", holds=abs(total) <= 1e-3),
    ]


def main() -> None:
    options = arguments(__doc__ or "")
    claims = speed()
    claims += trainmover(100_000 if options.full else 20_000)
    claims += others(options.full)
    claims += artifact(p.PERIODS if options.full else ("6h", "10m"))
    show(claims, options.json)


if __name__ == "__main__":
    main()

"""`everstep sim scenario.toml`: what failures would cost a job, and `everstep sim compare`: which answer costs least.

Run: everstep sim examples/scenarios/month.toml --report month.html
     everstep sim compare examples/scenarios/month.toml --strategies restart,nvrx,trainmover,everstep
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import App, Parameter

from everstep.cli.fold import folded
from everstep.core.errors import UsageError
from everstep.core.events import AnyEvent

app = App(name="sim", help="Simulate a job on a failing cluster: what it costs, and what helps.", version_flags=[])
Flag = Annotated[bool, Parameter(negative=())]
Many = Annotated[tuple[str, ...], Parameter(negative=())]


class Case(NamedTuple):
    """One run to make: a scenario's tree with its changes, and the traces it replays."""

    tree: Mapping[str, Any]
    origin: str
    traces: Mapping[str, str]
    swept: Mapping[str, object]


@app.default
def run(
    scenario: Path, *, report: Path | None = None, journal: Path | None = None, seed: int | None = None,
    set: Many = (), sweep: Many = (), json: Flag = False, full: Flag = False,
) -> int:  # fmt: skip
    """Simulate one scenario; with a sweep, once for each value.

    Args:
        scenario: a TOML file; examples/scenarios has some.
        report: write an HTML page with plots.
        journal: write the events as a job's journal (of the first run).
        seed: instead of the scenario's.
        set: KEY=VALUE, instead of the scenario's: --set cluster.standbys=4.
        sweep: KEY=VALUE,VALUE,...: one run each: --sweep failures.0.rate=1,2,4,8.
        json: print the results as JSON.
        full: play the scenario's [[faults]] on the whole control plane, with a report for every node (a few hundred
            nodes at most), and compare its decisions with the simulator's.
    """
    cases = cases_of(scenario, seed, set, sweep)
    if full:
        return play_full(cases[0])
    return show(cases, cases[0].tree.get("name", scenario.stem), report, journal, json, scenario)


@app.command
def compare(
    *scenarios: Path, strategies: str = "", report: Path | None = None, seed: int | None = None,
    set: Many = (), json: Flag = False,
) -> int:  # fmt: skip
    """Simulate several scenarios, or one under several strategies, with the same seeds.

    Args:
        scenarios: TOML files.
        strategies: names of presets, separated by commas: each scenario is run under each.
        report: write an HTML page with plots.
        seed: instead of the scenarios'.
        set: KEY=VALUE, in all of them.
        json: print the results as JSON.
    """
    if not scenarios or (len(scenarios) == 1 and not strategies):
        raise UsageError("compare: name at least two scenarios, or one and --strategies A,B")
    cases = []
    for path in scenarios:
        for name in strategies.split(",") if strategies else [""]:
            extra = (f"strategy.preset={name}",) if name else ()
            made = cases_of(path, seed, (*set, *extra), ())
            cases += [
                case._replace(tree={**case.tree, "name": name or case.tree.get("name", path.stem)}) for case in made
            ]
    return show(cases, "Comparison", report, None, json, None)


def cases_of(path: Path, seed: int | None, changes: Sequence[str], sweep: Sequence[str]) -> list[Case]:
    """All runs of a scenario: the product of what is swept, then seeds."""
    from everstep.sim.scenario import build, with_value

    tree = _read(path)
    tree.setdefault("name", path.stem)
    for text in changes:
        key, value = _setting(text, "--set")
        tree = with_value(tree, key, value)
    if seed is not None:
        tree["seed"] = seed
    swept = {key: list(values) for key, values in tree.pop("sweep", {}).items()}
    swept |= {
        key: value if isinstance(value, list) else [value] for key, value in (_setting(t, "--sweep") for t in sweep)
    }
    cases = []
    for values in itertools.product(*swept.values()):
        changed: Mapping[str, Any] = tree
        for key, value in zip(swept, values, strict=True):
            changed = with_value(changed, key, value)
        scenario = build(changed, str(path))
        traces = {spec.file: _text(path.parent / spec.file) for spec in scenario.failures if spec.file}
        for number in range(scenario.runs):
            seeded = {**changed, "seed": scenario.seed + number}
            cases.append(Case(seeded, str(path), traces, dict(zip(swept, values, strict=True))))
    return cases


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"{path}: cannot be read: {why}") from error


def _setting(text: str, flag: str) -> tuple[str, Any]:
    """KEY=VALUE with VALUE in TOML's syntax, else the plain string; with commas, a list."""
    import tomllib

    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise UsageError(f"{flag} {text!r}: expected KEY=VALUE, as in {flag} cluster.standbys=4")

    def value(part: str) -> Any:
        try:
            return tomllib.loads(f"value = {part}")["value"]
        except tomllib.TOMLDecodeError:
            return part

    whole = value(raw)
    if flag == "--sweep" and not isinstance(whole, list):
        return key, [value(part.strip()) for part in raw.split(",")]
    return key, whole


def show(
    cases: Sequence[Case], title: str, report: Path | None, journal: Path | None, as_json: bool, source: Path | None
) -> int:
    """Run them, and say what came of it."""
    import msgspec

    from everstep.sim.page import labelled, page

    results = []
    for number, case in enumerate(cases):
        results.append(simulate(case, journal if number == 0 else None, f"run {number + 1} of {len(cases)}"))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    swept: dict[str, Any] = {key: [case.swept[key] for case in cases] for key in cases[0].swept}
    if report is not None:
        text = _text(source) if source is not None else ""
        try:
            report.write_text(page(results, title, text, swept), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{report}: cannot be written: {error.strerror}") from error
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(results)).decode() + "\n")
    else:
        for label, result in labelled(results, swept).items():
            _print(label, result)
    return 0


def play_full(case: Case) -> int:
    """The machines of the control plane, then the simulator's engine; 1 when they decided differently."""
    from everstep.core.events import Decided, IncidentOpened
    from everstep.sim.engine import Engine
    from everstep.sim.scenario import build
    from everstep.testing.resolved import play

    scenario = build(case.tree, case.origin)
    machines, engine = [], []
    for at_s, record in play(scenario):
        if isinstance(record, IncidentOpened):
            print(f"{at_s:8.2f} s  {record.kind}: {record.why}")
        elif isinstance(record, Decided):
            machines.append(record.decision.action.value)
            print(f"{at_s:8.2f} s  {machines[-1]}: {record.decision.why}")

    def sink(at_s: float, epoch: int, event: AnyEvent) -> None:
        if isinstance(event, Decided):
            engine.append(event.decision.action.value)

    Engine(scenario, random.Random(scenario.seed), sink, case.traces).run()
    same = machines == engine
    print("the simulator decides the same" if same else f"the simulator decides differently: {', '.join(engine)}")
    return 0 if same else 1


def _told(label: str) -> Callable[[float], None] | None:
    """Progress on a terminal, and nowhere else."""
    if not sys.stderr.isatty():
        return None
    return lambda share: print(f"\r{label}: {share:4.0%}", end="", file=sys.stderr, flush=True)


def simulate(case: Case, journal: Path | None = None, label: str = "") -> Any:
    """One run; its events go into a journal when one is wanted."""
    from everstep.sim.engine import Engine
    from everstep.sim.scenario import build

    scenario = build(case.tree, case.origin)
    chance = random.Random(scenario.seed)
    if journal is None:
        return Engine(scenario, chance, None, case.traces, _told(label)).run()
    from everstep.control.journal import Journal
    from everstep.control.segments import Files
    from everstep.control.tender import Tender

    if not journal.absolute().parent.is_dir():
        raise UsageError(f"--journal {journal}: there is no folder {journal.absolute().parent}")
    if journal.exists() or Files(journal).numbers():
        raise UsageError(f"--journal {journal}: exists already")
    tender = Tender(journal)
    with Journal.open(journal, scenario.job.name, on_grown=tender.grown) as book:

        def sink(at_s: float, epoch: int, event: AnyEvent) -> None:
            book.append(event, at_s, at_s, epoch)

        result = Engine(scenario, chance, sink, case.traces, _told(label)).run()
    tender.finish()
    return result


def _print(label: str, result: Any) -> None:
    days = f"{result.wall_s / 86400:.4g} days on {result.accelerators} accelerators"
    lines = [f"{label}: goodput {result.goodput:.2%} of {days}"]
    shares = (f"{name} {share:.2%}" for name, share in result.shares.items() if share >= 0.00005)
    lines.append(f"  time: {', '.join(shares)}")
    counts = ", ".join(f"{name} {count}" for name, count in result.actions.items()) or "nothing"
    down = f"; down: median {result.down_s['median']:.3g} s, p99 {result.down_s['p99']:.3g} s" if result.down_s else ""
    missed = (
        f" ({', '.join(f'{n} {kind}' for kind, n in result.unnoticed.items())} unnoticed)" if result.unnoticed else ""
    )
    lines.append(
        f"  failures {result.failures}{missed}, answered by {counts}; steps redone {result.steps_redone}{down}"
    )
    print(folded("\n".join(lines), 4))

"""A scenario: cluster, job, saves, failures and the strategy that answers them, as one TOML file.

Every error names the key. Durations are seconds; rates are failures per 1000 node-days (6.5 and 2.34 were measured at
Meta, SYSTEMS section 14), of racks and slices per 1000 of theirs.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from everstep.core.config import Count, Group, Positive, PositiveSeconds, Seconds
from everstep.core.decisions import Action
from everstep.core.errors import UsageError
from everstep.plan.costs import flat, key
from everstep.plan.presets import PRESETS, Preset, Saving, preset
from everstep.sim.causes import census
from everstep.sim.workload import Pipeline

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Factor = Annotated[float, msgspec.Meta(ge=1)]
DAY_S = 86400.0
OTHERS_SLOW_S, OTHERS_SILENT_S = 60.0, 3600.0  # until other systems notice: assumed, as none published it


class Cluster(Group, frozen=True):
    """[cluster]: `nodes` have a role each, `standbys` wait beside them."""

    nodes: Positive = 1
    accelerators_per_node: Positive = 8
    standbys: Count = 0
    nodes_per_rack: Count = 0
    nodes_per_slice: Count = 0  # a slice is a cube of a torus: without it, those wired to it cannot go on
    optical: bool = False  # switches wire a spare node of any slice into a broken one
    rewire_s: Seconds = 10.0  # that takes so long (SYSTEMS section 6)
    repair_s: Seconds = 3600.0  # until a broken node, or another one in its place, is there
    soft_repair_s: Seconds = 0.0  # the same, when the machine itself is sound
    ready: tuple[str, ...] = ()  # with job.pipeline_nodes: nodes of the trace, in the order of their first roles


class Job(Group, frozen=True):
    """[job]. `replicas`: equal groups of nodes. `law`: what a job makes with less than all of them."""

    name: str = "simulated"
    replicas: Positive = 1
    min_replicas: Positive = 1
    min_nodes: Positive = 1
    step_s: PositiveSeconds = 10.0  # with all nodes; a pipeline tells it itself
    samples_per_step: PositiveSeconds = 1.0
    start_s: Seconds = 0.0
    stages: Positive = 1  # of a pipeline, when none is given below
    micro_batches: Positive = 1
    law: Literal["action", "replicas", "nodes", "table"] = "action"  # action: as what was done about it implies
    samples_per_s: dict[str, float] = msgspec.field(default_factory=dict)  # with law = "table": by number of nodes
    pipeline_nodes: Count = 0  # with law = "table": only whole pipelines of so many nodes work, the others wait
    fixed: bool = False  # the number of members may not change
    session: bool = True  # steps are watched and made again; else workers only stop and start together
    jitter: Share = 0.0  # 19 of 20 steps of a member differ by at most this with the lengths of its sequences
    noise: Share = 0.014  # standard deviation of a member's own time that its lengths do not explain
    compare_s: Seconds = 0.1  # a fingerprint of a member's state, for comparing replicas
    pipeline: Pipeline | None = None


class Saves(Group, frozen=True):
    """[saves]: instead of the preset's. Both intervals 0: nothing is saved."""

    every_s: Seconds = 0.0
    every_steps: Count = 0
    stall_s: Seconds = 0.0
    load_s: Seconds = 0.0
    durable_s: Seconds = 0.0  # from the end of the stall
    after_restart: bool = False  # one more after the first step
    aligned: bool = False  # at step numbers, however often one was saved between
    # One that a loss, a switch of strategy.tears or the end of the run overtakes fails and takes the job back to the
    # newest one, or to where it was so many steps before if that is further back. 0: only a loss takes it back.
    failed_undoes: Count = 0


class Failures(Group, frozen=True):
    """One [[failures]]: something that goes wrong again and again."""

    kind: Literal["exponential", "weibull", "periodic", "infant", "slow", "silent", "maintenance", "trace"]
    rate: Seconds = 0.0  # per 1000 node-days
    of: Literal["node", "rack", "slice"] = "node"  # what fails as one
    share: Share = 1.0  # of the nodes of a rack or slice that it takes
    every_s: Seconds = 0.0  # periodic
    shape: PositiveSeconds = 1.0  # weibull; the mean is that of `rate`
    factor: Factor = 1.0  # infant: how much more a new node fails at first
    decay_s: PositiveSeconds = 7 * DAY_S  # infant
    slowdown: Factor = 1.34  # slow (Greyhound: 1.34, for 72 minutes on average)
    lasts_s: PositiveSeconds = 4320.0  # slow; maintenance
    causes: str = ""  # a census to draw from: llama3, byterobust
    file: str = ""  # trace
    unit_s: PositiveSeconds = 0.001  # trace: of its times


class Fault(Group, frozen=True):
    """One [[faults]]: something that goes wrong once, at a moment. `everstep sim --full` plays it on whole machines.

    `whole`: and not before what struck earlier is over, every role is taken and every standby waits. So what is decided
    does not hang on how soon after the last fault this one comes.
    """

    kind: Literal["kill", "hang", "node-lost", "slow", "corrupt"]
    at_s: Seconds = 0.0
    at_step: Count = 0  # and when the job has made so many
    whole: bool = False
    node: Count = 0
    local_rank: Count = 0
    slowdown: Factor = 1.34
    lasts_s: PositiveSeconds = 4320.0


class Strategy(Group, frozen=True):
    """[strategy]: a preset of plan.presets, and what is to be different. The decisions are plan.policy's."""

    preset: str = "everstep"
    actions: tuple[Action, ...] = ()  # only these
    seconds: dict[str, Seconds] = msgspec.field(
        default_factory=dict
    )  # downtime by action, instead of the preset's curves
    # The same, by the nodes that are left.
    seconds_by_nodes: dict[str, dict[str, Seconds]] = msgspec.field(default_factory=dict)
    detect_s: Seconds = 0.0  # beyond what the downtimes hold
    # Instead of asking the detectors of detect/, which are our own: other systems take OTHERS_..., hangs detect_s.
    hang_detect_s: Seconds | None = None
    slow_detect_s: Seconds | None = None
    silent_detect_s: Seconds | None = None
    loses: Literal["step", "nothing"] = "step"  # the step under way, or what a roll back takes; else downtime only
    # A fault in a recovery: it begins anew, or another one follows; or with `meanwhile`, the next switch takes all, the
    # one after that finds nobody, and the job stands until one that follows another loss.
    overlap: Literal["again", "queue", "stands"] = "again"
    spared: bool = False  # no faults count while one is detected: the downtime of the closed forms
    after_fault: float = 0.0  # instead of the preset's slow-down of whoever computes for a dead neighbour
    idle_slows: bool = False  # so does the loss of a node without a role, until all form anew: Bamboo's simulator
    # The job works on at its old pace until what follows is ready, as Oobleck's artifact has it; and which switches to
    # that, by their numbers from 1 on, make the save under way fail, as does the end of the step that they cut off.
    meanwhile: bool = False
    tears: tuple[Positive, ...] = ()


class Scenario(Group, frozen=True):
    name: str = "scenario"
    seed: Count = 1
    runs: Positive = 1  # seeds from `seed` on
    duration_s: Seconds = 0.0
    days: Seconds = 0.0
    cluster: Cluster = Cluster()
    job: Job = Job()
    saves: Saves | None = None
    failures: tuple[Failures, ...] = ()
    faults: tuple[Fault, ...] = ()
    strategy: Strategy = Strategy()
    sweep: dict[str, list[Any]] = msgspec.field(default_factory=dict)  # full key -> its values

    @property
    def until_s(self) -> float:
        return self.duration_s or self.days * DAY_S


def parse(text: str, origin: str) -> Scenario:
    """The scenario of a TOML text. Raises UsageError; `origin` says where the text is from."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin}: not valid TOML: {error}") from error
    return build(tree, origin)


def build(tree: Mapping[str, Any], origin: str) -> Scenario:
    """As `parse`, of what TOML gives."""
    try:
        scenario = msgspec.convert(tree, Scenario)
    except msgspec.ValidationError as error:
        raise UsageError(f"{origin}: {_in_words(str(error))}") from error
    try:
        check(scenario)
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from error
    return scenario


def _in_words(error: str) -> str:
    """msgspec's message with the key first."""
    text, _, path = error.partition(" - at `$")
    place = path.rstrip("`").lstrip(".")
    unknown = re.search(r"unknown field `(\w+)`", text)
    if unknown is None:
        return f"{place or 'the file'}: {text[:1].lower()}{text[1:]}"
    name = unknown.group(1)
    close = difflib.get_close_matches(name, [known for known, _ in _keys(Scenario)], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown key {f'{place}.' if place else ''}{name}{hint}"


def _keys(group: type[Group]) -> Iterator[tuple[str, Any]]:
    kinds = (Cluster, Job, Saves, Failures, Fault, Strategy, Pipeline) if group is Scenario else ()
    for part in (group, *kinds):
        yield from ((field.name, field.type) for field in msgspec.structs.fields(part))


def _check_finite(value: object, where: str = "") -> None:
    """TOML has inf and nan, and no scenario needs them."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where} = {value}: expected a finite number")
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_finite(item, f"{where}.{name}" if where else str(name))
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            _check_finite(item, f"{where}[{place}]")


def check(scenario: Scenario) -> None:
    """Raises UsageError for what cannot be simulated."""
    cluster, job = scenario.cluster, scenario.job
    _check_finite(msgspec.to_builtins(scenario))
    if scenario.until_s <= 0:
        raise UsageError("days: say how long, with days or duration_s")
    if cluster.nodes % job.replicas:
        raise UsageError(f"job.replicas = {job.replicas}: does not divide cluster.nodes = {cluster.nodes}")
    if job.min_replicas > job.replicas:
        raise UsageError(f"job.min_replicas = {job.min_replicas}: more than job.replicas = {job.replicas}")
    if job.law == "table" and not job.samples_per_s:
        raise UsageError("job.samples_per_s: with job.law = 'table', give samples a second by number of nodes")
    _check_whole_pipelines(scenario)
    _check_switches(scenario)
    for name in (*job.samples_per_s, *(n for table in scenario.strategy.seconds_by_nodes.values() for n in table)):
        if not name.isdigit():
            raise UsageError(f"{name!r}: expected a number of nodes as key")
    for place, item in enumerate(scenario.failures):
        _check_failures(f"failures[{place}]", item, cluster)
    for place, fault in enumerate(scenario.faults):
        if fault.node >= cluster.nodes + cluster.standbys:
            raise UsageError(f"faults[{place}].node = {fault.node}: there are {cluster.nodes} and {cluster.standbys}")
        if fault.local_rank >= cluster.accelerators_per_node:
            raise UsageError(f"faults[{place}].local_rank = {fault.local_rank}: a node has fewer accelerators")
    system(scenario)
    if job.pipeline is not None:
        job.pipeline.peak_bytes()


def _check_whole_pipelines(scenario: Scenario) -> None:
    if scenario.job.pipeline_nodes:
        if scenario.job.law != "table" or scenario.strategy.meanwhile:
            raise UsageError("job.pipeline_nodes: it needs job.law = 'table', and no strategy.meanwhile")
        return
    for where, given in (
        ("cluster.ready", scenario.cluster.ready),
        ("strategy.idle_slows", scenario.strategy.idle_slows),
    ):
        if given:
            raise UsageError(f"{where}: it needs job.pipeline_nodes")


def _check_switches(scenario: Scenario) -> None:
    strategy, saves = scenario.strategy, scenario.saves or Saves()
    if strategy.overlap == "stands" and not strategy.meanwhile:
        raise UsageError("strategy.overlap = 'stands': it needs strategy.meanwhile")
    if strategy.tears and not (strategy.meanwhile and saves.failed_undoes):
        raise UsageError("strategy.tears: it needs strategy.meanwhile and saves.failed_undoes")


def _check_failures(where: str, item: Failures, cluster: Cluster) -> None:
    needs = {"periodic": "every_s", "trace": "file"}.get(item.kind, "rate")
    if not getattr(item, needs):
        raise UsageError(f"{where}.{needs}: failures of kind {item.kind!r} need it")
    if item.of != "node" and not getattr(cluster, f"nodes_per_{item.of}"):
        raise UsageError(f"{where}.of = {item.of!r}: say cluster.nodes_per_{item.of}")
    if item.of != "node" and item.kind not in ("exponential", "periodic"):
        raise UsageError(f"{where}.of = {item.of!r}: only exponential and periodic failures strike a {item.of}")
    if item.causes:
        census(item.causes)


def system(scenario: Scenario) -> Preset:
    """The preset with what the scenario says about it."""
    wanted = scenario.strategy
    if wanted.preset not in PRESETS:
        raise UsageError(f"strategy.preset = {wanted.preset!r}: there are {', '.join(PRESETS)}")
    made = preset(wanted.preset)
    known = {action.value for action in Action} | set(made.costs.priors)
    for name in (*wanted.seconds, *wanted.seconds_by_nodes):
        if name not in known:
            raise UsageError(f"strategy.seconds.{name}: there are {', '.join(sorted(known))}")
    curves = {**made.curves, **{name: flat(value, "the scenario") for name, value in wanted.seconds.items()}}
    saves = scenario.saves
    saving = made.saving if saves is None else Saving(saves.every_s, saves.every_steps, saves.stall_s, saves.load_s)
    return msgspec.structs.replace(
        made, actions=frozenset(wanted.actions) or made.actions, curves=curves, saving=saving,
        after_fault=wanted.after_fault or made.after_fault,
    )  # fmt: skip


def with_value(tree: Mapping[str, Any], where: str, value: object) -> dict[str, Any]:
    """The tree with one key changed, as in failures.0.rate. Raises UsageError when there is no such place."""
    first, _, rest = where.partition(".")
    made = dict(tree)
    if not rest:
        made[first] = value
        return made
    below = made.get(first, {})
    if isinstance(below, list):
        number, _, rest = rest.partition(".")
        if not number.isdigit() or int(number) >= len(below) or not rest:
            raise UsageError(f"{where!r}: there are {len(below)} of these; write {first}.0.KEY")
        made[first] = [with_value(item, rest, value) if n == int(number) else item for n, item in enumerate(below)]
        return made
    if not isinstance(below, Mapping):
        raise UsageError(f"{where!r}: {first} is a single value")
    made[first] = with_value(below, rest, value)
    return made


def seconds_of(scenario: Scenario, costs_s: float, action: Action | str, nodes: int) -> float:
    """Downtime of an action: the strategy's table by nodes, where there is one."""
    table = scenario.strategy.seconds_by_nodes.get(key(action))
    if table is None:
        return costs_s
    return table[str(min(table, key=lambda name: abs(int(name) - nodes)))]

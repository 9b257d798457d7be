"""What a job tells a monitoring system: its `View` as Prometheus text, and the table that names every number of it.

`METRICS` is the one list. The page /metrics, OpenTelemetry (observe/otlp.py), docs/metrics.md and the Grafana dashboard
are made from it, and tests hold deploy/prometheus/alerts.yml against it. Units are in the names; what can become less
is a gauge, even where it usually only grows (a span of time may be charged to another bucket once its cause is known).
No label has unbounded values: nothing is told by rank, node or incident, and of a script's metrics and of causes only
so many by name. Every series has the label `training_job`; Prometheus itself uses `job`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from everstep.core.load import DeviceLoad, NodeLoad
from everstep.observe.view import Bucket, IncidentView, NodeState, SaveView, View, WorkerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
JOB = "training_job"
MAX_SCRIPT_METRICS = 64  # names that a script logs and that are told
MAX_CAUSES = 32  # causes of faults that are told by name, the others as OTHER
MAX_LABEL = 64  # characters of a label's value
OTHER = "other"

# Told as 0 before the first one: otherwise the first of its kind is no increase.
KINDS: tuple[str, ...] = (
    "crash",
    "exception",
    "hang",
    "node-lost",
    "slow",
    "corrupt",
    "anomaly",
    "rolled-back",
    "save-failed",
)
KINDS += ("step-fell-back", "incomplete", "drain", "stop")
STAGES: tuple[str, ...] = (
    "checking",
    "forming",
    "running",
    "re-seating",
    "suspect",
    "evicting",
    "re-forming",
    "stopping",
)
STAGES += ("finished", "failed")

Labelled = Mapping[tuple[str, ...], float]
Read = Callable[[View], float | Labelled | None]


class Metric(NamedTuple):
    """One name. `read`: its value in a View, by the values of `labels` if it has any; None: not known yet."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    read: Read
    labels: tuple[str, ...] = ()

    def values(self, view: View) -> Labelled:
        value = self.read(view)
        if isinstance(value, Mapping):
            return value
        return {} if value is None else {(): float(value)}

    @property
    def unit(self) -> str:
        """As OpenTelemetry writes it (UCUM); translated back to Prometheus it changes no name."""
        stem = self.name.removesuffix("_total")
        units = {"_seconds": "s", "_bytes": "By", "_ratio": "1"}
        return next((unit for suffix, unit in units.items() if stem.endswith(suffix)), "")


def prometheus_text(view: View) -> bytes:
    """The answer to GET /metrics; its type is CONTENT_TYPE. Needs the extra: pip install "everstep[dashboard]"."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(view))
    return generate_latest(registry)


class _Collector:
    """What a registry asks for families."""

    def __init__(self, view: View) -> None:
        self.view = view

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric in METRICS:
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = make(metric.name, metric.help, labels=[JOB, *metric.labels])
            values = metric.values(self.view)
            for labels, value in values.items():
                family.add_metric([shown(self.view.job), *labels], value)
            if values:
                yield family


def shown(text: str) -> str:
    """A label's value: of bounded length, and in one line."""
    return " ".join(text.split())[:MAX_LABEL]


# Readers ----------------------------------------------------------------------------------------------------


def known(value: float) -> float | None:
    """-1 is "unknown" in a View."""
    return value if value >= 0 else None


def wall(view: View, at_s: float) -> float | None:
    """Seconds since 1970."""
    return view.submitted_wall_s + at_s if at_s >= 0 else None


def counted(found: Iterable[str], names: Iterable[str]) -> Labelled:
    """How often each name is found; all names are there."""
    counts = Counter(found)
    return {(shown(name),): float(counts[name]) for name in names}


def bounded(values: Mapping[str, float], most: int) -> Labelled:
    """The first names, and the others together. Of counters the first names must be the oldest: then none becomes
    less because it is told as OTHER."""
    kept: dict[tuple[str, ...], float] = {}
    for number, (name, value) in enumerate(values.items()):
        key = (shown(name) if number < most else OTHER,)
        kept[key] = kept.get(key, 0.0) + value
    return kept


def spread(values: Sequence[float]) -> Labelled:
    """How a number is distributed over workers, in three series however many there are."""
    if not values:
        return {}
    return {("min",): min(values), ("median",): statistics.median(values), ("max",): max(values)}


def info(view: View) -> Labelled:
    return {(shown(view.script), str(view.simulated).lower()): 1.0}


def stages(view: View) -> Labelled:
    return counted([view.stage], dict.fromkeys((*STAGES, view.stage)) if view.stage else STAGES)


def script_metrics(view: View) -> Labelled:
    names = list(view.metrics)[:MAX_SCRIPT_METRICS]
    return {(shown(name),): view.metrics[name] for name in names}


def worker_states(view: View) -> Labelled:
    names = [WorkerState(state).name.lower() for state in view.workers.states]
    return counted(names, (state.name.lower() for state in WorkerState))


def own_step_s(view: View) -> Labelled:
    return spread([seconds for seconds in view.workers.own_s if seconds >= 0])


def resident_bytes(view: View) -> Labelled:
    return spread([size for size in view.workers.rss_bytes if size > 0])


def over_nodes(read: Callable[[NodeLoad], float]) -> Read:
    """`read`: of a node; -1 where it is not known."""
    return lambda view: spread([value for load in view.loads.values() if (value := read(load)) >= 0])


def over_devices(read: Callable[[DeviceLoad], float]) -> Read:
    def told(view: View) -> Labelled:
        values = [read(device) for load in view.loads.values() for device in load.devices]
        return spread([value for value in values if value >= 0])

    return told


def worker_processors(view: View) -> Labelled:
    shares = (share for load in view.loads.values() for share in load.workers)
    return spread([share / 100 for share in shares if share >= 0])


def incidents(view: View) -> Labelled:
    names = dict.fromkeys(KINDS, 0) | view.by_kind
    return bounded(names, len(KINDS) + MAX_CAUSES)


def open_incidents(view: View) -> Labelled:
    found = [incident.kind for incident in view.incidents if not incident.outcome]
    return counted(found, dict.fromkeys((*KINDS, *found)))


def causes(values: Mapping[str, float]) -> Labelled:
    """The greatest ones by name: these are gauges."""
    return bounded(dict(sorted(values.items(), key=lambda item: -item[1])), MAX_CAUSES)


def _newest_down(view: View) -> IncidentView | None:
    """The newest incident that is over and during which nobody made a step."""
    return next((i for i in reversed(view.incidents) if i.outcome and i.downtime_s >= 0), None)


def last_downtime_s(view: View) -> float | None:
    newest = _newest_down(view)
    return None if newest is None else newest.downtime_s


def last_phases_s(view: View) -> Labelled:
    newest = _newest_down(view)
    return {} if newest is None else {(shown(phase),): seconds for phase, seconds in newest.phases.items()}


def durable(view: View) -> list[SaveView]:
    return sorted((save for save in view.saves if save.durable_s >= 0), key=lambda save: save.durable_s)


def last_save(view: View) -> float | None:
    done = durable(view)
    return wall(view, done[-1].durable_s) if done else None


def save_took_s(view: View) -> float | None:
    done = [save for save in durable(view) if save.requested_s >= 0]
    return done[-1].durable_s - done[-1].requested_s if done else None


def save_every_s(view: View) -> float | None:
    """The median counts: restarts and saves that a person asked for change it little."""
    at = [save.durable_s for save in durable(view)]
    return statistics.median(b - a for a, b in zip(at, at[1:], strict=False)) if len(at) > 1 else None


def save_waits_s(view: View) -> float:
    """Age of the oldest save that is neither done nor failed. One that a newer one has overtaken is not waited for."""
    newest = max((save.step for save in durable(view)), default=-1)
    waiting = [s for s in view.saves if s.requested_s >= 0 and s.durable_s < 0 and not s.failed and s.step > newest]
    return max((view.now_s - save.requested_s for save in waiting), default=0.0)


def alerts(view: View) -> Labelled:
    newest: dict[tuple[str, ...], float] = {}
    for alert in view.alerts:
        newest[(shown(alert.kind),)] = view.submitted_wall_s + alert.at_s
    return newest


def links(view: View) -> Labelled:
    """Of the newest formation of which that is known."""
    found = next((epoch for epoch in reversed(view.epochs) if epoch.links_kept >= 0), None)
    return {} if found is None else {("kept",): found.links_kept, ("new",): max(0, found.links_new)}


# The table --------------------------------------------------------------------------------------------------


def gauge(name: str, text: str, read: Read, *labels: str) -> Metric:
    return Metric(f"everstep_{name}", "gauge", text, read, labels)


def counter(name: str, text: str, read: Read, *labels: str) -> Metric:
    return Metric(f"everstep_{name}_total", "counter", text, read, labels)


JOB_METRICS = (
    gauge("job_info", "1; its labels tell which script runs.", info, "script", "simulated"),
    gauge("job_stage", "1 for the stage the job is in, 0 for the others.", stages, "stage"),
    gauge("job_submitted_timestamp_seconds", "When the job was submitted.", lambda v: v.submitted_wall_s),
    gauge("job_ended", "1 once the job has ended.", lambda v: float(v.ended)),
    gauge("job_ended_timestamp_seconds", "When it ended; not there while it runs.", lambda v: wall(v, v.ended_s)),
    gauge("job_exit_code", "Exit code of the job; not there while it runs.", lambda v: v.exit_code),
    gauge("epoch", "Number of the present membership; it rises with each change.", lambda v: v.epoch),
    gauge("epoch_members", "Members of it.", lambda v: v.epochs[-1].members if v.epochs else None),
    gauge("epoch_links", "Links of it that were kept, and that are new.", links, "which"),
    gauge("controller_term", "Lives of the controller so far.", lambda v: v.term),
    counter("restarts", "Epochs beyond the first.", lambda v: v.restarts),
    counter("journal_entries", "Entries of the journal.", lambda v: v.entries),
    gauge("journal_bytes", "Bytes of the journal.", lambda v: v.offset),
    gauge("alert_timestamp_seconds", "When the newest alert of this kind was told.", alerts, "kind"),
)
PROGRESS_METRICS = (
    gauge("step", "Highest optimizer step of the job.", lambda v: known(v.step)),
    gauge("goal_step", "Steps at which the job ends; not there if nobody said.", lambda v: v.goal or None),
    counter("steps", "Steps made, those that were made again included.", lambda v: v.steps),
    counter("redone_steps", "Steps that were made again.", lambda v: v.redone_steps),
    gauge("step_seconds", "Seconds a step, recently; 0 while unknown.", lambda v: v.step_s),
    gauge("last_step_timestamp_seconds", "When the newest step was made.", lambda v: wall(v, v.last_step_s)),
    gauge(
        "script_metric",
        f"Newest values that the script logged, the first {MAX_SCRIPT_METRICS} names; its units.",
        script_metrics,
        "name",
    ),
)
FLEET_METRICS = (
    gauge(
        "nodes",
        "Nodes by what they do.",
        lambda v: counted((node.state.value for node in v.nodes), (state.value for state in NodeState)),
        "state",
    ),
    gauge("workers", "Workers by what they do, standbys included.", worker_states, "state"),
    gauge("worker_step_seconds", "A worker's own time in a step, waits not counted.", own_step_s, "over_workers"),
    gauge("worker_resident_bytes", "Resident memory of a worker.", resident_bytes, "over_workers"),
    gauge("worker_processors", "Processors that a worker and its children use.", worker_processors, "over_workers"),
    gauge(
        "node_processors_busy_ratio",
        "Of a node's processors, those that work.",
        over_nodes(lambda load: load.cpu_share),
        "over_nodes",
    ),
    gauge("node_memory_used_ratio", "Of a node's memory.", over_nodes(lambda load: load.memory_share), "over_nodes"),
    gauge("node_shm_used_ratio", "Of a node's /dev/shm.", over_nodes(lambda load: load.shm_share), "over_nodes"),
    gauge(
        "device_busy_ratio",
        "Of the time, that in which a device ran something.",
        over_devices(lambda device: device.busy_percent / 100),
        "over_devices",
    ),
    gauge(
        "device_memory_used_ratio",
        "Of a device's memory.",
        over_devices(lambda device: device.used_percent / 100),
        "over_devices",
    ),
    gauge("device_temperature_celsius", "Of a device.", over_devices(lambda device: device.celsius), "over_devices"),
    gauge("accelerators", "Accelerators that the job has.", lambda v: v.fleet.total),
    gauge("accelerators_acting", "Those that train.", lambda v: v.fleet.acting),
    gauge("accelerators_spare", "Those that wait to take a place.", lambda v: v.fleet.spare),
    gauge("accelerators_missing", "Those that the job wants and does not have.", lambda v: v.fleet.missing),
    gauge("accelerators_slow", "Those that train and are judged slow.", lambda v: v.fleet.slow),
)
INCIDENT_METRICS = (
    counter("incidents", "Incidents by what happened.", incidents, "kind"),
    gauge("incidents_by_cause", "Incidents by what was found to be the cause.", lambda v: causes(v.by_cause), "cause"),
    gauge("incidents_open", "Those that are not over.", open_incidents, "kind"),
    gauge("downtime_seconds", "Time without a step, of all incidents together.", lambda v: v.downtime_s),
    gauge("incident_downtime_seconds", "That of the newest incident which is over.", last_downtime_s),
    gauge("incident_phase_seconds", "Of which in each phase.", last_phases_s, "phase"),
)
SAVE_METRICS = (
    counter("saves", "Saves that are complete on disk.", lambda v: v.num_saves),
    counter("saves_failed", "Saves that failed.", lambda v: v.saves_failed),
    gauge("saved_step", "Newest step that is complete on disk.", lambda v: known(v.saved_step)),
    gauge("last_save_timestamp_seconds", "When it became so.", last_save),
    gauge("save_seconds", "From the request of the newest save until it was complete.", save_took_s),
    gauge("save_interval_seconds", "Usual time from one save to the next (median).", save_every_s),
    gauge("save_pending_seconds", "Age of the oldest save that is neither complete nor failed.", save_waits_s),
    gauge(
        "memory_step",
        "Newest step of which memory of the nodes keeps every role.",
        lambda v: known(min(v.memory_steps.values(), default=-1)),
    ),
)
GOODPUT_METRICS = (
    gauge("ettr_ratio", "Effective training time, as a share of the time since submission.", lambda v: v.ettr),
    gauge(
        "accelerator_seconds",
        "What the time of the accelerators was spent on; docs/goodput.md defines it.",
        lambda v: {(bucket.value,): v.buckets.get(bucket.value, 0.0) for bucket in Bucket},
        "bucket",
    ),
    gauge(
        "lost_accelerator_seconds",
        "Time lost by cause; by bucket where no incident caused it.",
        lambda v: causes(v.costs),
        "cause",
    ),
)


SECTIONS = {
    "The job": JOB_METRICS,
    "Progress": PROGRESS_METRICS,
    "Nodes, workers, accelerators": FLEET_METRICS,
    "Incidents": INCIDENT_METRICS,
    "Saves": SAVE_METRICS,
    "Goodput": GOODPUT_METRICS,
}
METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)

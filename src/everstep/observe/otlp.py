"""OpenTelemetry export: the metrics of a View and a trace for each incident that is over, by OTLP over HTTP.

Metrics have the names of observe/metrics.py, incidents the shape of observe/spans.py. `update` makes plain data of the
View on the caller's thread, when a round is due; a thread of its own sends, so a collector that does not answer holds
up nobody. Needs the extra: pip install "everstep[otel]". The variables of OpenTelemetry hold (headers, certificate).
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from everstep.core.errors import UsageError
from everstep.observe.metrics import JOB, METRICS, Labelled, Metric
from everstep.observe.spans import Happened, Span, spans
from everstep.observe.view import KEPT_INCIDENTS, View

EVERY_S = 15.0
TIMEOUT_S = 10.0  # of one round; the exporter tries again within it
CLOSE_S = 1.5  # `close` waits for the last round, no longer
SETTLE_S = 30.0  # after its end an incident is told: log lines that come late may still tell its cause
MAX_REASON = 200  # characters of why a round failed
EXPORTER = "opentelemetry.exporter.otlp.proto.http"


class Round(NamedTuple):
    """All metrics at one moment. Times in ns since 1970; `since_ns`: what counters count from."""

    job: str
    since_ns: int
    at_ns: int
    values: list[tuple[Metric, Labelled]]


class Sender:
    """Speaks OTLP; the only part that knows OpenTelemetry's packages."""

    def __init__(self, url: str) -> None:
        """`url`: of the collector, as http://host:4318. Raises UsageError without the extra, or for another URL."""
        base = _checked(url).rstrip("/")
        try:
            metrics = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
            traces = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        except ImportError as error:
            raise UsageError(f'--otlp needs OpenTelemetry: pip install "everstep[otel]" ({error})') from error
        self.reasons = _Reasons()
        self.metrics: Any = metrics.OTLPMetricExporter(endpoint=f"{base}/v1/metrics", timeout=TIMEOUT_S)
        self.traces: Any = traces.OTLPSpanExporter(endpoint=f"{base}/v1/traces", timeout=TIMEOUT_S)

    def send_metrics(self, batch: Round) -> bool:
        self.reasons.first = ""
        return self.metrics.export(_metrics_data(batch)).name == "SUCCESS"  # type: ignore[no-any-return]

    def send_spans(self, job: str, found: Sequence[Span]) -> bool:
        self.reasons.first = ""
        readable = [_readable(span, resource) for resource in [_resource(job)] for span in found]
        return self.traces.export(readable).name == "SUCCESS"  # type: ignore[no-any-return]

    def why(self) -> str:
        """It failed, when it did."""
        return self.reasons.first[:MAX_REASON] or "no reason told"

    def stop(self) -> None:
        """Nothing is tried again from here on."""
        self.metrics.shutdown()
        self.traces.shutdown()


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url
    except ValueError:  # of a port or an address
        pass
    raise UsageError(f"--otlp {url!r}: expected http://HOST:PORT or https://HOST:PORT")


class _Reasons(logging.Handler):
    """Keeps what the exporters log first of a failure, instead of a line for each try."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ""
        self.logger = logging.getLogger(EXPORTER)
        self.propagated, self.logger.propagate = self.logger.propagate, False
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or record.getMessage()

    def close(self) -> None:
        self.logger.removeHandler(self)
        self.logger.propagate = self.propagated
        super().close()


class OtlpExport:
    """start(), then update(view) as often as the View changes, at last close(); or as a context."""

    def __init__(
        self,
        url: str,
        every_s: float = EVERY_S,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self.sender = Sender(url)
        self.url, self.every_s, self.say = url, every_s, say
        self.due_s = 0.0  # on the monotonic clock
        self.told: set[str] = set()  # incidents that were handed over
        self.over = False  # the job has ended, and that was handed over
        self.thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        # Shared with the thread, under `changed`.
        self.changed = threading.Condition()
        self.round: Round | None = None  # the newest one that is not sent
        self.spans: list[list[Span]] = []  # of one incident each
        self.closing = False

    def start(self) -> None:
        self.thread.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, view: View) -> None:
        """Cheap while no round is due. The View is not kept."""
        now_s = time.monotonic()
        if self.over or (now_s < self.due_s and not view.ended):
            return
        self.due_s, self.over = now_s + self.every_s, view.ended
        self._hand_over(_round(view), self._new_spans(view, last=view.ended))

    def close(self, view: View | None = None) -> None:
        """Sends what waits, and this View, for CLOSE_S at most."""
        if view is not None and not self.over:
            self._hand_over(_round(view), self._new_spans(view, last=True))
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join(CLOSE_S)
        self.sender.stop()
        self.thread.join(0.2)
        self.sender.reasons.close()

    def _new_spans(self, view: View, last: bool) -> list[list[Span]]:
        there = {incident.id for incident in view.incidents}
        over = [i for i in view.incidents if i.outcome and (last or view.now_s >= i.closed_s + SETTLE_S)]
        new = [incident for incident in over if incident.id not in self.told]
        self.told = (self.told & there) | {incident.id for incident in new}
        return [spans(view, incident) for incident in new]

    def _hand_over(self, batch: Round, found: list[list[Span]]) -> None:
        with self.changed:
            self.round = batch
            self.spans = [*self.spans, *found][-KEPT_INCIDENTS:]
            self.changed.notify()

    # The thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        failed = False
        while (work := self._take()) is not None:
            batch, found = work
            sent = self.sender.send_metrics(batch)
            # The server may be there for the one and not for the other: each is tried.
            if found and not self.sender.send_spans(batch.job, [span for each in found for span in each]):
                sent = False
                self._put_back(found)
            if sent == failed:
                failed = not sent
                self.say(f"otlp: {self.url} " + ("takes data again" if sent else f"takes no data: {self.sender.why()}"))

    def _take(self) -> tuple[Round, list[list[Span]]] | None:
        """Waits for something to send; None: nothing is left, and nothing will come."""
        with self.changed:
            self.changed.wait_for(lambda: self.round is not None or self.closing)
            if self.round is None:
                return None
            work, self.round, self.spans = (self.round, self.spans), None, []
            return work

    def _put_back(self, found: list[list[Span]]) -> None:
        with self.changed:
            self.spans = [*found, *self.spans][-KEPT_INCIDENTS:]


def _round(view: View) -> Round:
    """A job that runs is as it is now; one that has ended is as it was then."""
    since_ns = round(view.submitted_wall_s * 1e9)
    at_ns = since_ns + round(view.now_s * 1e9) if view.ended else time.time_ns()
    return Round(view.job, since_ns, at_ns, [(metric, metric.values(view)) for metric in METRICS])


# To OpenTelemetry's classes -------------------------------------------------------------------------------------------


def _resource(job: str) -> Any:
    """With what OTEL_RESOURCE_ATTRIBUTES adds."""
    resources = importlib.import_module("opentelemetry.sdk.resources")
    return resources.Resource.create({"service.name": "everstep", "service.instance.id": job, "everstep.job": job})


def _scope() -> Any:
    util = importlib.import_module("opentelemetry.sdk.util.instrumentation")
    return util.InstrumentationScope("everstep", "")


def _metrics_data(batch: Round) -> Any:
    export = importlib.import_module("opentelemetry.sdk.metrics.export")
    metrics = [_metric(export, metric, values, batch) for metric, values in batch.values if values]
    scope = export.ScopeMetrics(_scope(), metrics, "")
    return export.MetricsData([export.ResourceMetrics(_resource(batch.job), [scope], "")])


def _metric(export: Any, metric: Metric, values: Labelled, batch: Round) -> Any:
    points = [
        export.NumberDataPoint(
            {JOB: batch.job, **dict(zip(metric.labels, labels, strict=True))}, batch.since_ns, batch.at_ns, float(value)
        )
        for labels, value in values.items()
    ]
    if metric.kind == "counter":
        cumulative = export.AggregationTemporality.CUMULATIVE
        data = export.Sum(points, aggregation_temporality=cumulative, is_monotonic=True)
    else:
        data = export.Gauge(points)
    return export.Metric(metric.name, metric.help, metric.unit, data)


def _readable(span: Span, resource: Any) -> Any:
    """A span that has ended, as the SDK hands it to an exporter."""
    sdk, api = (importlib.import_module(name) for name in ("opentelemetry.sdk.trace", "opentelemetry.trace"))

    def context(span_id: int) -> Any:
        return api.SpanContext(span.trace_id, span_id, is_remote=False, trace_flags=api.TraceFlags(1))

    code = api.StatusCode.ERROR if span.error else api.StatusCode.UNSET
    return sdk.ReadableSpan(
        span.name,
        context=context(span.span_id),
        parent=context(span.parent_id) if span.parent_id else None,
        resource=resource,
        attributes=span.attributes,
        events=[_event(sdk, event) for event in span.events],
        status=api.Status(code, span.error or None),
        start_time=span.begin_ns,
        end_time=span.end_ns,
        instrumentation_scope=_scope(),
    )


def _event(sdk: Any, event: Happened) -> Any:
    return sdk.Event(event.name, event.attributes, event.at_ns)

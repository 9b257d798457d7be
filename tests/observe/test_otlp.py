"""Export by OTLP, to a receiver of our own that reads what OpenTelemetry's own definition of the format says."""

from __future__ import annotations

import gzip
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from everstep.core.errors import UsageError
from everstep.observe.metrics import METRICS
from everstep.observe.otlp import OtlpExport, Sender
from everstep.observe.view import IncidentView, Moment, View

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra everstep[otel] is not installed")
WAIT_S = 20.0


class Collector(ThreadingHTTPServer):
    """Keeps each request's path and body; answers with `status`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: queue.Queue[tuple[str, bytes]] = queue.Queue()
        self.status = 200
        self.held = threading.Event()  # answers wait for it
        self.held.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def next(self, path: str) -> bytes:
        while True:
            found, body = self.got.get(timeout=WAIT_S)
            if found == path:
                return body


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.server.held.wait(WAIT_S)
        status = self.server.status
        self.server.got.put((self.path, body))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Not on the console of the tests."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.held.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def said() -> list[str]:
    return []


def export_to(collector: Collector, said: list[str]) -> OtlpExport:
    export = OtlpExport(collector.url, every_s=0.0, say=said.append)
    export.start()
    return export


def job(**changes: Any) -> View:
    view = View(job="gpt", submitted_wall_s=1e9, now_s=100.0, stage="running", step=40, steps=45, ettr=0.5, **changes)
    view.by_kind = {"crash": len(view.incidents)}
    return view


def crash(number: int) -> IncidentView:
    return IncidentView(
        f"I{number:03d}", "crash", 1, 50.0, "killed", first_sign_s=49.0, closed_s=53.0, outcome="recovered",
        downtime_s=4.0, phases={"detect": 1.0, "form": 3.0}, timeline=[Moment(50.0, "detect", "seen")],
    )  # fmt: skip


def read_metrics(body: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    about = {item.key: item.value.string_value for item in resource.resource.attributes}
    return about, {metric.name: metric for metric in resource.scope_metrics[0].metrics}


def read_spans(body: bytes) -> list[Any]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    return list(resource.scope_spans[0].spans)


def test_metrics_and_traces_arrive(collector: Collector, said: list[str]) -> None:
    export = export_to(collector, said)
    view = job(incidents=[crash(1), IncidentView("I002", "slow", 1, 90.0, "still open")])
    export.update(view)
    about, metrics = read_metrics(collector.next("/v1/metrics"))
    assert (about["service.name"], about["service.instance.id"]) == ("everstep", "gpt")
    assert set(metrics) == {metric.name for metric in METRICS if metric.values(view)}
    steps, ettr = metrics["everstep_steps_total"], metrics["everstep_ettr_ratio"]
    (point,) = steps.sum.data_points
    assert (point.as_double, point.start_time_unix_nano, steps.sum.is_monotonic) == (45.0, 10**18, True)
    assert (ettr.gauge.data_points[0].as_double, ettr.unit) == (0.5, "1")
    root, *phases = read_spans(collector.next("/v1/traces"))
    assert (root.name, root.start_time_unix_nano, root.end_time_unix_nano) == (
        "incident: crash", 1_000_000_049 * 10**9, 1_000_000_053 * 10**9,
    )  # fmt: skip
    assert (root.status.code, root.status.message, root.events[0].name) == (2, "killed", "detect")
    assert [(p.name, p.parent_span_id, p.trace_id) for p in phases] == [
        ("detect", root.span_id, root.trace_id), ("form", root.span_id, root.trace_id),
    ]  # fmt: skip
    export.close(view)
    assert said == []
    assert collector.got.get(timeout=WAIT_S)[0] == "/v1/metrics"
    assert collector.got.empty(), "an incident is told once"


def test_a_collector_that_fails_is_said_once_and_gets_all_later(collector: Collector, said: list[str]) -> None:
    collector.status = 400
    export = export_to(collector, said)
    for number in (1, 2):
        export.update(job(incidents=[crash(i) for i in range(1, number + 1)]))
        collector.next("/v1/traces")
    collector.status = 200
    export.close(job(incidents=[crash(1), crash(2), crash(3)]))
    sent = {span.trace_id for span in read_spans(collector.next("/v1/traces"))}
    assert len(sent) == 3
    assert said == [
        f"otlp: {collector.url} takes no data: Failed to export spans batch code: 400, reason: Bad Request",
        f"otlp: {collector.url} takes data again",
    ]


def test_a_collector_that_hangs_holds_up_nobody(collector: Collector, said: list[str]) -> None:
    collector.held.clear()
    export = export_to(collector, said)
    for number in range(1, 601):
        export.update(job(incidents=[crash(number)]))
    assert len(export.spans) <= 256
    collector.held.set()
    export.close()
    assert not export.thread.is_alive()


def test_a_job_that_has_ended_is_told_as_of_its_end_and_once(collector: Collector, said: list[str]) -> None:
    ended = job(exit_code=0, incidents=[crash(1)])
    with OtlpExport(collector.url, say=said.append) as export:
        export.update(job())
        for _ in range(3):
            export.update(ended)
    bodies = [collector.got.get(timeout=WAIT_S) for _ in range(collector.got.qsize())]
    _, metrics = read_metrics([body for path, body in bodies if path == "/v1/metrics"][-1])
    assert metrics["everstep_step"].gauge.data_points[0].time_unix_nano == (10**9 + 100) * 10**9
    assert len([path for path, _ in bodies if path == "/v1/metrics"]) <= 2
    assert len([path for path, _ in bodies if path == "/v1/traces"]) == 1, "the end waits for no round"
    assert said == []


@pytest.mark.parametrize("url", ["collector:4318", "http://", "http://[bad", "http://host:port", "ftp://host"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="expected http"):
        Sender(url)

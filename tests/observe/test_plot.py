"""The picture: written, of the right size, with every incident, also for sparse or odd input."""

from __future__ import annotations

import builtins
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from everstep.core import events as e
from everstep.core.errors import UsageError
from everstep.core.types import Blame
from everstep.observe.plot import Row, plot, read_rows

pytest.importorskip("matplotlib")


def rows_of(journal: list[e.Entry]) -> list[Row]:
    """A training log as the synthetic job would have written it: every step of each epoch, loss falling."""
    made = []
    for begin, first, count in ((2.0, 1, 40), (12.9, 31, 50), (28.4, 71, 50)):
        for i in range(count):
            step = first + i
            loss = 2.2 + 3.3 * math.exp(-step / 30) + 0.06 * math.sin(step * 2.3)
            made.append(Row(step, journal[0].wall_s + begin + 0.25 * i + 0.02 * math.sin(step * 7), loss))
    return made


def size(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_plot_of_a_run_with_incidents(journal: list[e.Entry], tmp_path: Path) -> None:
    out = tmp_path / "run.png"
    summary = plot(journal, rows_of(journal), out)
    assert len(summary.incidents) == 2
    assert size(out) == (1430, 880)


def test_plot_without_a_training_log_and_of_nothing(journal: list[e.Entry], tmp_path: Path) -> None:
    plot(journal, [], tmp_path / "steps.png")
    plot([], [], tmp_path / "nothing.png")
    assert size(tmp_path / "steps.png") == size(tmp_path / "nothing.png") == (1430, 880)


def test_plot_with_more_incidents_than_labels(journal: list[e.Entry], tmp_path: Path) -> None:
    extra = [
        e.Entry(900 + i, journal[0].t_s + 2 * i, 0.0, "demo", 1, e.IncidentOpened(f"X{i}", "crash", (), "why"))
        for i in range(20)
    ]
    assert len(plot([*journal, *extra], rows_of(journal), tmp_path / "many.png").incidents) == 22


def test_rows_are_read_and_a_cut_last_line_is_forgiven(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    line = json.dumps({"step": 1, "loss": 2.5, "time": 12.0, "lr": 0.1})
    log.write_text(f'{line}\n{{"step": 2, "ti')
    assert read_rows(log) == [Row(1, 12.0, 2.5)]
    log.write_text(f"not json\n{line}\n")
    with pytest.raises(UsageError, match=r"line 1"):
        read_rows(log)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(UsageError, match=r"everstep\[plot\]"):
        plot([], [], tmp_path / "x.png")


def test_culprit_without_a_worker_has_a_label(journal: list[e.Entry], tmp_path: Path) -> None:
    opened = e.IncidentOpened("I009", "hang", (Blame(-1, "", "hang"),), "all look the same")
    entry = e.Entry(99, journal[0].t_s + 41.0, 0.0, "demo", 3, opened)
    assert plot([*journal, entry], [], tmp_path / "x.png").incidents[-1].id == "I009"

"""Scenario files: errors that name the key, sweeps, traces, the report's page, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.main import main
from everstep.core.errors import UsageError
from everstep.sim.scenario import parse, with_value
from everstep.sim.traces import read

EXAMPLES = Path(__file__).parents[2] / "examples/scenarios"
SMALL = """
days = 2
[cluster]
nodes = 8
standbys = 1
[job]
replicas = 4
[[failures]]
kind = "exponential"
rate = 200
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("days = 1\n[cluster]\nnods = 3", "unknown key cluster.nods; did you mean 'nodes'"),
        ("days = 1\n[cluster]\nnodes = 'many'", "cluster.nodes: expected `int`, got `str`"),
        ("days = 1\n[cluster]\nnodes = 0", "cluster.nodes: expected `int` >= 1"),
        ("[cluster]\nnodes = 3", "days: say how long"),
        ("days = 1\n[cluster]\nnodes = 3\n[job]\nreplicas = 2", "job.replicas = 2: does not divide"),
        ("days = 1\n[[failures]]\nkind = 'exponential'", "failures[0].rate: failures of kind 'exponential' need it"),
        ("days = 1\n[[failures]]\nkind = 'exponential'\nrate = 1\nof = 'rack'", "say cluster.nodes_per_rack"),
        ("days = 1\n[[failures]]\nkind = 'exponential'\nrate = 1\ncauses = 'x'", "there are llama3, byterobust"),
        ("days = 1\n[strategy]\npreset = 'hope'", "strategy.preset = 'hope': there are everstep"),
        ("days = 1\n[strategy]\nseconds = { hope = 1 }", "strategy.seconds.hope: there are"),
        ("days = ", "not valid TOML"),
        ("days = inf", "days = inf: expected a finite number"),
        ("days = 1\n[[failures]]\nkind = 'exponential'\nrate = inf", "failures[0].rate = inf"),
        ("days = 1\n[strategy]\nafter_fault = nan", "strategy.after_fault = nan"),
        ("days = 1\nseed = -1", "seed: expected `int` >= 0"),
    ],
)
def test_errors_name_the_key(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(text, "file.toml")
    assert str(error.value).startswith("file.toml: ")
    assert said in str(error.value)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    parse(path.read_text(encoding="utf-8"), path.name)


def test_one_value_can_be_changed() -> None:
    tree: dict[str, Any] = {"failures": [{"rate": 1}, {"rate": 2}]}
    assert with_value(tree, "failures.1.rate", 5)["failures"] == [{"rate": 1}, {"rate": 5}]
    assert with_value(tree, "cluster.nodes", 4)["cluster"] == {"nodes": 4}
    assert tree["failures"][1] == {"rate": 2}
    with pytest.raises(UsageError, match="there are 2 of these"):
        with_value(tree, "failures.2.rate", 5)


def test_traces_of_both_forms() -> None:
    p3 = read((EXAMPLES / "traces/spot-p3.csv").read_text(encoding="utf-8"))
    here, most, lost, node_hours, at_s = 0, 0, 0, 0.0, 0.0
    for change in p3:
        node_hours += here * (change.at_s - at_s) / 3600
        at_s = change.at_s
        here += 1 if change.came else -1
        lost += not change.came
        most = max(most, here)
    assert most == 32
    assert lost / node_hours == pytest.approx(0.612, rel=0.01)
    counts = read((EXAMPLES / "traces/spot-gcp-a100.txt").read_text(encoding="utf-8"))
    assert sum(1 for c in counts if c.at_s == 0) == 55
    assert counts[-1].at_s == pytest.approx(26.5 * 3600, rel=0.1)
    with pytest.raises(UsageError, match="line 2"):
        read("0,add,n1\n5,gone,n1")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "small.toml", tmp_path / "page.html"
    file.write_text(SMALL, encoding="utf-8")
    assert main(["sim", str(file), "--report", str(page), "--sweep", "cluster.standbys=0,1,2", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["accelerators"] for result in results] == [64, 72, 80]
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == 4 and "<script" not in html and "http" not in html
    assert all(f"standbys {number}</td>" in html for number in range(3))
    assert main(["sim", "compare", str(file), "--strategies", "restart,everstep", "--seed", "5"]) == 0
    told = capsys.readouterr().out
    assert "restart: goodput" in told and "everstep: goodput" in told
    assert main(["sim", str(file), "--journal", str(tmp_path / "journal.jsonl")]) == 0
    assert main(["sim", str(EXAMPLES / "faults.toml"), "--full"]) == 0
    assert capsys.readouterr().out.count(" s  promote-standby: ") == 5
    assert main(["sim", str(file), "--set", "cluster.nods=1"]) == 2
    assert "unknown key cluster.nods" in capsys.readouterr().err


def test_a_spot_trace_is_lived_through(capsys: pytest.CaptureFixture[str]) -> None:
    """The job goes on with whoever is there, to the end; nodes that come later are taken in."""
    assert main(["sim", str(EXAMPLES / "spot.toml"), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["wall_s"] == 41000
    assert result["failures"] > 100 and result["actions"]["re-partition-stages"] > 50
    assert result["incidents"]["grow"] > 10
    assert 0.3 < result["goodput"] < 0.9
    assert sum(result["shares"].values()) == pytest.approx(1)

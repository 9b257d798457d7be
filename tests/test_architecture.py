"""The rules which hold for the whole tree: layers, no torch in the brain, size budget, and a few things never written.

Each rule is a function from source to findings, so that a test can also show that it finds something.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import budget
import pytest

import everstep

ROOT = Path(__file__).parents[1]
SRC = [source for source in budget.sources(ROOT) if source.path.startswith("src/")]
BRAIN = ("core", "detect", "plan", "control", "sim", "observe", "dashboard", "cli")
MUSCLE = ("probe", "state", "comms", "parallel", "data", "train")
OUTSIDE = ("integrations", "testing")

# These run in processes of their own, made for torch, and import it there, by name: path -> why.
WORKER_SIDE = {
    "src/everstep/control/store.py": "serves torch's TCPStore",
    "src/everstep/control/zygote.py": "has torch imported, so that workers need not",
}

# Files of the brain which import an extra's package: when they are asked to, or only for who serves a dashboard.
OPTIONAL = {
    "src/everstep/observe/metrics.py": "prometheus_client",
    "src/everstep/observe/otlp.py": "opentelemetry",
    "src/everstep/observe/plot.py": "matplotlib",
    "src/everstep/cli/plan_plot.py": "matplotlib",
    "src/everstep/detect/similar.py": "numpy",
    "src/everstep/dashboard/app.py": "starlette",
    "src/everstep/dashboard/serve.py": "uvicorn",
}

# Detectors that compute with arrays over members need numpy on import. Who uses them loads them when it has to judge.
ARRAYS = ("change", "jitter", "peers", "straggler", "usual", "workload")
NUMERIC = (*(f"src/everstep/detect/{name}.py" for name in ARRAYS), "src/everstep/sim/samples.py")

# time.sleep is forbidden in src but here: path -> why.
SLEEPS = {
    "src/everstep/control/sockets.py": "looks twice whether bytes move: the kernel does not tell",
    "src/everstep/testing/local.py": "polls a condition with a deadline, as tests do",
}

# Deciding parts: time and random numbers are their arguments. A folder stands for all its files.
PURE = (
    "src/everstep/detect/",
    "src/everstep/plan/",
    "src/everstep/control/anomalies.py",
    "src/everstep/control/causes.py",
    "src/everstep/control/findings.py",
    "src/everstep/sim/",
    "src/everstep/control/changes.py",
    "src/everstep/control/compaction.py",
    "src/everstep/control/corrupted.py",
    "src/everstep/control/dealings.py",
    "src/everstep/control/deciding.py",
    "src/everstep/control/draft.py",
    "src/everstep/control/drain.py",
    "src/everstep/control/following.py",
    "src/everstep/control/job.py",
    "src/everstep/control/lifecycle.py",
    "src/everstep/control/loads.py",
    "src/everstep/control/membership.py",
    "src/everstep/control/node.py",
    "src/everstep/control/raised.py",
    "src/everstep/control/recovery.py",
    "src/everstep/control/reform.py",
    "src/everstep/control/refusal.py",
    "src/everstep/control/roles.py",
    "src/everstep/control/saved.py",
    "src/everstep/control/seating.py",
    "src/everstep/control/seats.py",
    "src/everstep/control/slowness.py",
    "src/everstep/control/ticks.py",
    "src/everstep/control/urgency.py",
    "src/everstep/control/verdicts.py",
    "src/everstep/dashboard/guard.py",
    "src/everstep/observe/cases.py",
    "src/everstep/observe/charts.py",
    "src/everstep/observe/explain.py",
    "src/everstep/observe/flame.py",
    "src/everstep/observe/goodput.py",
    "src/everstep/observe/html.py",
    "src/everstep/observe/incident_page.py",
    "src/everstep/observe/known.py",
    "src/everstep/observe/places.py",
    "src/everstep/observe/progress.py",
    "src/everstep/observe/report.py",
    "src/everstep/observe/unsaved.py",
    "src/everstep/observe/report_page.py",
    "src/everstep/observe/series.py",
    "src/everstep/observe/shares.py",
    "src/everstep/observe/svg.py",
    "src/everstep/observe/todo.py",
    "src/everstep/observe/top.py",
    "src/everstep/observe/training.py",
    "src/everstep/observe/view.py",
    "src/everstep/observe/usage.py",
    "src/everstep/observe/viewer.py",
    "src/everstep/data/account.py",
    "src/everstep/data/ledger.py",
    "src/everstep/data/sampler.py",
    "src/everstep/observe/metrics.py",
    "src/everstep/observe/spans.py",
    "src/everstep/state/reconcile.py",
    "src/everstep/state/reshape.py",
    "src/everstep/state/slots.py",
    "src/everstep/train/commit.py",
    "src/everstep/train/protocol.py",
    "src/everstep/train/kept.py",
    "src/everstep/train/resolve.py",
)
WORLD = {"asyncio", "datetime", "io", "multiprocessing", "os", "pathlib", "random", "secrets", "select", "shutil"}
WORLD |= {"socket", "subprocess", "sys", "tempfile", "threading", "time", "uuid"}

# The one file that may use private names of torch.distributed.
PRIVATE_C10D: str | None = "src/everstep/comms/group.py"

PUBLIC = ["Batches", "Saving", "Session", "keep", "lengths", "restartable", "session"]  # everstep.__all__

Finder = Callable[[ast.AST], Iterator[str]]


def folder(path: str) -> str:
    """The part of everstep a file belongs to; empty for the package's own __init__."""
    parts = path.removeprefix("src/everstep/").split("/")
    return parts[0] if len(parts) > 1 else ""


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every absolute module name that is imported, inside functions and by importlib too, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value, node.lineno


def statements_only(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """As `imports`, without importlib."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports(node)


def called(node: ast.Call) -> str:
    """Last name of what is called: "sleep" for time.sleep()."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def elastic(tree: ast.AST) -> Iterator[str]:
    """Imports of torchelastic's internals, which change with each release of torch."""
    for name, line in imports(tree):
        if within(name, "torch.distributed.elastic"):
            yield f"line {line}: {name}"


def private_c10d(tree: ast.AST) -> Iterator[str]:
    """Private names of torch.distributed: imported, or taken from what was imported from there."""
    aliases = set()
    for name, line in imports(tree):
        if within(name, "torch.distributed") and any(part.startswith("_") for part in name.split(".")):
            yield f"line {line}: {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {item.asname for item in node.names if item.asname and within(item.name, "torch.distributed")}
        elif isinstance(node, ast.ImportFrom) and node.module and within(node.module, "torch"):
            inside = [item for item in node.names if within(f"{node.module}.{item.name}", "torch.distributed")]
            aliases |= {item.asname or item.name for item in inside}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            base = ast.unparse(node.value)
            if base.split(".")[0] in aliases or within(base, "torch.distributed"):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def swallowed(tree: ast.AST) -> Iterator[str]:
    """Bare excepts, and handlers of every error which do nothing."""
    wide = ("Exception", "BaseException")
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            names = {item.id for item in ast.walk(node.type) if isinstance(item, ast.Name)} if node.type else set()
            idle = all(
                isinstance(part, (ast.Pass, ast.Continue))
                or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
                for part in node.body
            )
            if node.type is None or (names.intersection(wide) and idle):
                yield f"line {node.lineno}: a swallowed error"
        elif isinstance(node, ast.Call) and called(node) == "suppress":
            names = {ast.unparse(argument) for argument in node.args}
            if names.intersection(wide):
                yield f"line {node.lineno}: a swallowed error"


def sleeps(tree: ast.AST) -> Iterator[str]:
    """time.sleep under any name: what waits must wait for something."""
    for name, line in imports(tree):
        if name == "time.sleep":
            yield f"line {line}: {name}"
    clocks = {"time"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            clocks |= {item.asname for item in node.names if item.name == "time" and item.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "sleep" and ast.unparse(node.value) in clocks:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def findings(rule: Finder, skip: Collection[str] = ()) -> list[str]:
    return [f"{source.path} {text}" for source in SRC if source.path not in skip for text in rule(source.tree)]


def test_size_budget() -> None:
    assert budget.judge(ROOT) == []


def test_layers() -> None:
    command = "import sys; from importlinter import cli; sys.exit(cli.lint_imports(is_debug_mode=False, no_cache=True))"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_folder_has_a_layer_and_a_half() -> None:
    folders = {folder(source.path) for source in SRC} - {""}
    assert folders <= {*BRAIN, *MUSCLE, *OUTSIDE}
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = config["tool"]["importlinter"]["contracts"]
    layered = {name.strip("() ") for layer in contract["layers"] for name in layer.split("|")}
    assert layered == {*BRAIN, *MUSCLE, *OUTSIDE}


def test_no_torch_in_the_brain() -> None:
    brain = [source for source in SRC if folder(source.path) in BRAIN]
    assert len(brain) > 10
    found = [
        f"{source.path} line {line}: {name}"
        for source in brain
        for name, line in (statements_only if source.path in WORKER_SIDE else imports)(source.tree)
        if within(name, "torch")
    ]
    assert found == []
    needed = {source.path for source in brain if any(within(name, "torch") for name, _ in imports(source.tree))}
    assert needed == set(WORKER_SIDE), "an exception is no longer needed: remove it"


def test_brain_imports_nothing_beyond_the_base_install() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    base = {text.split(">")[0] for text in config["project"]["dependencies"]}
    allowed = sys.stdlib_module_names | base | {"everstep"}
    brain = [source for source in SRC if folder(source.path) in (*BRAIN, "") and source.path not in WORKER_SIDE]
    foreign = {(s.path, name.split(".")[0]) for s in brain for name, _ in imports(s.tree)}
    assert {(path, package) for path, package in foreign if package not in allowed} == {
        *OPTIONAL.items(),
        *((path, "numpy") for path in NUMERIC),
    }


def test_importing_the_whole_brain_loads_no_torch() -> None:
    paths = [s.path for s in SRC if folder(s.path) in (*BRAIN, "") and not s.path.endswith("/__main__.py")]
    paths = [path for path in paths if path not in NUMERIC]
    modules = [
        path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths
    ]
    code = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(json.dumps(sorted(loaded & {'torch', 'numpy', 'matplotlib'})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_deciding_parts_do_not_touch_the_world() -> None:
    pure = [source for source in SRC if source.path.startswith(PURE)]
    missing = [name for name in PURE if not any(source.path.startswith(name) for source in SRC)]
    assert missing == [], "PURE names files that are not there"
    found = [
        f"{source.path} line {line}: {name}"
        for source in pure
        for name, line in imports(source.tree)
        if name.split(".")[0] in WORLD
    ]
    assert found == []


def test_no_private_torch_elastic() -> None:
    assert findings(elastic) == []


def test_private_c10d_names_sit_in_one_file() -> None:
    assert findings(private_c10d, (PRIVATE_C10D,) if PRIVATE_C10D else ()) == []
    assert not PRIVATE_C10D or any(source.path == PRIVATE_C10D and [*private_c10d(source.tree)] for source in SRC)


def test_no_swallowed_errors() -> None:
    assert findings(swallowed) == []


def test_no_sleep() -> None:
    assert findings(sleeps, SLEEPS) == []
    needed = {source.path for source in SRC if [*sleeps(source.tree)]}
    assert needed.issuperset(SLEEPS), "an exception is no longer needed: remove it"


def test_public_surface() -> None:
    assert sorted(getattr(everstep, "__all__", [])) == sorted(PUBLIC)


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (elastic, "def f():\n    import torch.distributed.elastic.agent.server as s"),
        (elastic, "import importlib\nimportlib.import_module('torch.distributed.elastic.utils')"),
        (elastic, "from torch.distributed import elastic"),
        (private_c10d, "from torch.distributed.distributed_c10d import _world"),
        (private_c10d, "import torch.distributed as dist\ndist._make_nccl_premul_sum"),
        (private_c10d, "from torch.distributed import distributed_c10d as c\nc._world.pg_map"),
        (private_c10d, "import torch\ntorch.distributed._symmetric_memory"),
        (swallowed, "try:\n    f()\nexcept:\n    raise"),
        (swallowed, "for x in y:\n    try:\n        f()\n    except (OSError, Exception):\n        continue"),
        (swallowed, "with contextlib.suppress(Exception):\n    f()"),
        (sleeps, "import time as clock\nclock.sleep(1)"),
        (sleeps, "from time import sleep"),
    ],
)
def test_rules_find_what_they_forbid(rule: Finder, code: str) -> None:
    assert list(rule(ast.parse(code)))


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (elastic, "import torch.distributed\nTEXT = 'torch.distributed.elastic'"),
        (private_c10d, "import torch\ntorch._dynamo.config\nself._world"),
        (swallowed, "try:\n    f()\nexcept OSError:\n    pass"),
        (swallowed, "try:\n    f()\nexcept Exception as error:\n    report(error)"),
        (sleeps, "import asyncio\nasyncio.sleep(0)"),
    ],
)
def test_rules_leave_alone_what_is_fine(rule: Finder, code: str) -> None:
    assert not list(rule(ast.parse(code)))


def test_budget_finds_what_it_forbids(tmp_path: Path) -> None:
    body = "\n".join(f"    x = {number}" for number in range(budget.MAX_FUNCTION_LINES))
    file = tmp_path / "src/long.py"
    file.parent.mkdir()
    file.write_text(f"def f(a, *b: int, c):\n{body}\n" + "\n" * budget.MAX_FILE_LINES, encoding="utf-8")
    assert [line.split(": ", 1)[1][:12] for line in budget.judge(tmp_path)] == [
        "the median f", "one function", "581 lines, t", "no docstring", "81 lines, th", "line 1: no t",
    ]  # fmt: skip


def test_budget_asks_for_unneeded_exceptions_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/fine.py").write_text('"""Fine."""\n\ndef f() -> None: ...\n', encoding="utf-8")
    monkeypatch.setattr(budget, "EXCEPTIONS", {"src/fine.py": "it once was long"})
    assert budget.judge(tmp_path) == ["src/fine.py: its exception is no longer needed: remove it"]

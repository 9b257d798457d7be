"""What cannot be run is known before anything is started, and nothing of the user's is imported to find out."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from everstep.control.launch import Kind
from everstep.control.target import why_not

RAN = "open('ran', 'a').close()\n"  # in every file that must not be executed


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of each: scripts, packages with and without __init__ and __main__, a zip file, a program."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "script.py", "full/__init__.py", "full/__main__.py", "full/inner/__init__.py", "full/inner/train.py",
        "bare/__init__.py", "bare/train.py", "spaces/deep/train.py", "lib/elsewhere.py",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RAN)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/__init__.py").write_text(RAN + "__path__.append('lib')\n")
    (tmp_path / "native").mkdir()
    (tmp_path / "native/fast.abi3.so").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.py").touch()
    for name, inside in (("app.pyz", "__main__.py"), ("data.zip", "data.txt")):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(inside, RAN)
    program = tmp_path / "program.sh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return tmp_path


def refused(kind: Kind, target: str, python: str = "", **env: str) -> str:
    why = why_not(kind, target, python, {"PATH": os.environ["PATH"], **env})
    assert not Path("ran").exists(), "something of the user's was executed"
    return why


FINE = [
    (Kind.SCRIPT, "script.py"), (Kind.SCRIPT, "empty.py"), (Kind.SCRIPT, "full"), (Kind.SCRIPT, "./full/"),
    (Kind.SCRIPT, "app.pyz"),
    (Kind.MODULE, "script"), (Kind.MODULE, "full"), (Kind.MODULE, "full.inner.train"), (Kind.MODULE, "bare.train"),
    (Kind.MODULE, "spaces.deep.train"), (Kind.MODULE, "json.tool"), (Kind.MODULE, "this"),
    (Kind.MODULE, "odd.elsewhere"), (Kind.MODULE, "torch.utils.bottleneck"), (Kind.MODULE, "everstep"),
    (Kind.PROGRAM, "sh"), (Kind.PROGRAM, "./program.sh"),
]  # fmt: skip


def test_a_script_that_this_user_may_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("script.py").chmod(0)
    if not os.geteuid():  # root may read it: what the system would tell anybody else
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.R_OK)
    assert refused(Kind.SCRIPT, "script.py") == "script.py: this user may not read it"


@pytest.mark.parametrize(("kind", "target"), FINE)
def test_what_runs_is_let_through(kind: Kind, target: str) -> None:
    assert refused(kind, target) == ""


@pytest.mark.parametrize(
    ("kind", "target", "parts"),
    [
        (Kind.SCRIPT, "nope.py", ("nope.py: no such file in ", "for a module use -m")),
        (Kind.SCRIPT, "empty", ("empty is a directory without a __main__.py", "name the script in it")),
        (Kind.SCRIPT, "data.zip", ("data.zip is a zip file without a __main__.py",)),
        (Kind.MODULE, "nope", ("-m nope: no module named nope", "on PYTHONPATH or installed for ")),
        (Kind.MODULE, "nope.train", ("-m nope.train: no module named nope",)),
        (Kind.MODULE, "full.nope", ("no module named nope in package full (", "/full)")),
        (Kind.MODULE, "full.inner.nope.x", ("no module named nope in package full.inner",)),
        (Kind.MODULE, "script.x", ("script is a module and not a package",)),
        (Kind.MODULE, "script.py", ("to run the file script.py leave -m out",)),
        (Kind.MODULE, "./full/inner/train.py", ("to run the file ./full/inner/train.py leave -m out",)),
        (Kind.MODULE, "bare", ("package bare has no __main__.py", "name a module in it")),
        (Kind.MODULE, "spaces", ("package spaces has no __main__.py",)),
        (Kind.MODULE, "full.", ("no module named  in package full",)),
        (Kind.MODULE, "sys", ("it is compiled",)),
        (Kind.MODULE, "native.fast", ("it is compiled",)),
        (Kind.PROGRAM, "nope", ("nope: no such program in any folder on PATH",)),
        (Kind.PROGRAM, "./nope", ("./nope: no such program in ",)),
        (Kind.PROGRAM, "./script.py", ("is not executable: chmod +x it",)),
        (Kind.PROGRAM, "program.sh", ("write ./program.sh",)),
    ],
)
def test_what_cannot_run_is_refused_with_what_where_and_what_to_do(
    kind: Kind, target: str, parts: tuple[str, ...]
) -> None:
    why = refused(kind, target)
    assert all(part in why for part in parts), why


def test_the_environment_decides_where_modules_are() -> None:
    assert "no module named elsewhere" in refused(Kind.MODULE, "elsewhere")
    assert refused(Kind.MODULE, "elsewhere", PYTHONPATH="lib") == ""
    assert "no module named script" in refused(Kind.MODULE, "script", PYTHONSAFEPATH="1")


def test_another_interpreter_must_be_there_and_knows_its_own_modules() -> None:
    assert "no such interpreter" in refused(Kind.SCRIPT, "script.py", python="/nowhere/python")
    assert refused(Kind.MODULE, "only_there", python=sys.executable) == ""


@pytest.mark.parametrize("target", ["full.inner.train", "bare.train", "spaces.deep.train", "full.inner.nope", "odd.x"])
def test_no_package_is_imported_to_look_inside(folder: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """`python -m everstep` has the folder on its own path, where find_spec would import the parent."""
    monkeypatch.syspath_prepend(folder)
    refused(Kind.MODULE, target)


@pytest.mark.parametrize(("kind", "target"), [x for x in FINE if x[0] is not Kind.PROGRAM and "full" in x[1]])
def test_python_agrees(kind: Kind, target: str) -> None:
    """The same targets under the interpreter itself: what is let through runs."""
    command = [sys.executable, *(["-m"] if kind is Kind.MODULE else []), target]
    assert subprocess.run(command, timeout=60).returncode == 0

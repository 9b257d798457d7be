"""What `everstep run` is given: directories and zip files run as under python, what cannot run is refused at once."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.testing.local import LocalRun

PLAIN = ("--no-zygote", "--nproc-per-node", "1")
TELLS = """
import helper, os, pickle, sys
class Local: pass
pickle.dumps(Local())
print(sys.argv, __file__, repr(__package__), __spec__.name, os.path.samefile(sys.path[0], sys.argv[0]), helper.NAME)
"""


def packed(tmp_path: Path, kind: str) -> Path:
    """A program of two files, as a directory or as a zip file."""
    files = {"__main__.py": TELLS, "helper.py": "NAME = 'helper'\n"}
    path = tmp_path / ("app" if kind == "directory" else "app.pyz")
    if kind == "directory":
        path.mkdir()
        for name, text in files.items():
            (path / name).write_text(text)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
    return path


@pytest.mark.parametrize("safe_path", ["", "1"])
@pytest.mark.parametrize("kind", ["directory", "zip file"])
def test_directories_and_zip_files_run_as_under_python(tmp_path: Path, kind: str, safe_path: str) -> None:
    path = packed(tmp_path, kind)
    command = [sys.executable, path.name, "a", "b"]
    expected = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
    with LocalRun(tmp_path, path.name, *PLAIN, args=("a", "b"), PYTHONSAFEPATH=safe_path) as run:
        assert run.wait() == ExitCode.OK, run.text()
    assert f"[rank0]: {expected}\n" in run.text()


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (("empty",), "empty is a directory without a __main__.py"),
        (("-m", "no_such_module.train"), "-m no_such_module.train: no module named no_such_module"),
        (("-m", "empty.train"), "no module named train in package empty"),
        (("nope.py",), "nope.py: no such file in"),
        (("--controller", "127.0.0.1:9", "--nnodes", "2", "nope.py"), "nope.py: no such file in"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(tmp_path: Path, line: tuple[str, ...], part: str) -> None:
    (tmp_path / "empty").mkdir()
    with LocalRun(tmp_path, line[-1], *PLAIN, *line[:-1]) as run:
        assert run.wait() == ExitCode.USAGE, run.text()
    assert run.text().startswith("everstep: error: ") and part in run.text()
    assert run.text().count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_script_that_vanishes_later_is_the_workers_failure(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import os, sys\nos.unlink(sys.argv[0])\nsys.exit(4)\n")
    with LocalRun(tmp_path, path.name, *PLAIN, "--max-restarts", "1") as run:
        assert run.wait() == ExitCode.FAILED
    assert [x.exit.code for x in run.events(e.WorkerEnded)][-1] == 2
    assert "can't open file" in run.text()


def test_who_could_not_be_started_did_not_raise(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/nowhere/python\n")
    python.chmod(0o755)
    (tmp_path / "script.py").touch()
    with LocalRun(tmp_path, "script.py", *PLAIN, "--max-restarts", "0", PYTHON_EXEC=str(python)) as run:
        assert run.wait() == ExitCode.FAILED
    assert f"rank 0 on node0 could not be started: cannot start {python} in " in run.text()
    assert "to do: Nothing of the script ran" in run.text()
    assert "raised could" not in run.text()

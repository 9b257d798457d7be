"""The guard of tests/conftest.py: what a test of real processes leaves behind is found, named and ended."""

from __future__ import annotations

import re
import subprocess
import uuid
from pathlib import Path

import pytest

LEAKS = """
import pathlib, subprocess, sys
daemon = "import subprocess; subprocess.Popen(['sleep', '61'], start_new_session=True)"
kept = []

def test_clean():
    subprocess.run([sys.executable, "-IS", "-c", "0"], check=True)

def test_daemon():
    subprocess.run([sys.executable, "-IS", "-c", daemon], check=True)

def test_child_with_a_cleaned_environment():
    kept.append(subprocess.Popen(["/bin/sleep", "62"], env={}))

def test_shared_memory():
    pathlib.Path("/dev/shm/SEGMENT").write_bytes(b"1")

def test_clean_again():
    for child in kept:
        assert child.wait() == -9
"""


@pytest.fixture
def segment() -> str:
    return f"everstep-test-{uuid.uuid4().hex}"


def test_leftovers_of_a_test_are_found_named_and_ended(pytester: pytest.Pytester, segment: str) -> None:
    text = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    pytester.makeconftest(re.sub(r"(?m)^SEGMENTS_GONE_WITHIN_S = .*$", "SEGMENTS_GONE_WITHIN_S = 3.0", text))
    for folder in ("integration", "pure"):
        (pytester.path / folder).mkdir()
    (pytester.path / "integration/test_leaks.py").write_text(LEAKS.replace("SEGMENT", segment), encoding="utf-8")
    (pytester.path / "pure/test_not_watched.py").write_text("def test_one() -> None:\n    pass\n", encoding="utf-8")
    try:
        # Not in this process: its own guard would be asked for the same children.
        result = pytester.runpytest_subprocess("--import-mode=importlib", "-p", "no:xdist", timeout=40)
    finally:
        Path("/dev/shm", segment).unlink(missing_ok=True)
    result.assert_outcomes(passed=6, errors=3)
    text = result.stdout.str()
    daemon = re.search(r"process (\d+): sleep 61\n", text)
    child = re.search(r"process (\d+): /bin/sleep 62\n", text)
    assert daemon and child
    assert f"shared memory: /dev/shm/{segment}\n" in text
    assert not Path("/proc", daemon[1]).exists()


def test_venv_refuses_an_old_python(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    for name in ("scripts/venv.sh", "requirements/lock.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((root / name).read_bytes())
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    done = subprocess.run(
        ["bash", "scripts/venv.sh"], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "PYTHON": str(old)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()

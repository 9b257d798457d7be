"""A launcher that has to find its job first: nodes come in any order, and who waits can be stopped."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path

import pytest

from everstep.core.errors import ExitCode
from everstep.testing.local import LocalRun

PLAIN = ("--no-zygote", "--nproc-per-node", "1", "--nnodes", "2")
LOCAL = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((LOCAL, 0)) as probe:
        return int(probe.getsockname()[1])


def static(rank: int, port: int, host: str = LOCAL) -> tuple[str, ...]:
    return (*PLAIN, "--node-rank", str(rank), "--master-addr", host, "--master-port", str(port))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two hosts' folders; the home directory that they share is the one above, and empty."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "script.py").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    return tmp_path / "one", tmp_path / "two"


def test_a_joiner_waits_for_the_controller_and_its_token(folders: tuple[Path, Path]) -> None:
    port, home = free_port(), str(folders[0].parent)
    with LocalRun(folders[1], "script.py", *static(1, port), HOME=home) as joiner:
        joiner.until(lambda: f"waiting for the controller at {LOCAL}:{port} (up to 600 s)" in joiner.text())
        assert not (folders[0].parent / ".everstep").exists()
        with LocalRun(folders[0], "script.py", *static(0, port), HOME=home) as host:
            assert host.wait() == joiner.wait() == ExitCode.OK, joiner.text()
        assert "[rank1]: rank 1" in joiner.text()
        assert joiner.text().count("waiting for") == 1


def test_a_token_that_is_not_there_is_awaited_too(folders: tuple[Path, Path]) -> None:
    """The hosts share no home directory: somebody copies the file."""
    port, (one, two) = free_port(), folders
    with LocalRun(one, "script.py", *static(0, port), HOME=str(one)) as host:
        host.until(lambda: "controller at" in host.text())
        with LocalRun(two, "script.py", *static(1, port), HOME=str(two)) as joiner:
            joiner.until(lambda: f"waiting for the token in {two}/.everstep/token (up to 600 s)" in joiner.text())
            copy = two / ".everstep" / "token"
            copy.parent.mkdir()
            copy.write_bytes((one / ".everstep" / "token").read_bytes())  # as many do, and forget the mode
            joiner.until(lambda: f"token file {copy} can be used by others" in joiner.text())
            copy.chmod(0o600)
            assert host.wait() == joiner.wait() == ExitCode.OK, joiner.text()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_can_be_stopped(folders: tuple[Path, Path], signum: signal.Signals) -> None:
    with LocalRun(folders[1], "script.py", *static(1, free_port()), HOME=str(folders[1])) as joiner:
        joiner.until(lambda: "waiting for the controller" in joiner.text())
        joiner.signal(signum)
        assert joiner.wait() == 128 + signum
        assert joiner.text().splitlines()[-1] == f"everstep: {signum.name}: stopped before there was a job to join"
        assert "Traceback" not in joiner.text()


def test_a_name_that_nobody_ever_knows_ends_at_the_join_timeout(folders: tuple[Path, Path]) -> None:
    options = (*static(1, 29500, "no-such-host.invalid"), "--rdzv-conf", "join_timeout=2")
    with LocalRun(folders[1], "script.py", *options, HOME=str(folders[1])) as joiner:
        assert joiner.wait() == ExitCode.UNREACHABLE
        assert "waiting for the controller at no-such-host.invalid:29500 (up to 2 s)" in joiner.text()
        assert joiner.text().splitlines()[-1].startswith("everstep: error: no controller at no-such-host.invalid:29500")
        assert "the name cannot be resolved" in joiner.text()
        assert "Traceback" not in joiner.text()


def test_a_foreign_program_at_the_endpoint_is_told(folders: tuple[Path, Path]) -> None:
    with socket.create_server((LOCAL, 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        options = (*PLAIN, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{LOCAL}:{port}")
        with LocalRun(folders[1], "script.py", *options, HOME=str(folders[1])) as joiner:
            assert joiner.wait() == ExitCode.UNREACHABLE
            assert f"the controller at {LOCAL}:{port} cannot be joined: " in joiner.text()
            assert "token" not in joiner.text()
        thread.join()

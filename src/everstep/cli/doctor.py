"""`everstep doctor`: is this machine fit for training? And with --at: are several, and which one slows the others?

Run: everstep doctor                                       this machine
     everstep doctor --nodes 16 --at node0:29400           the same command on each of 16 machines

Exit code: 0 when nothing is wrong; UNFIT (11) when this node is broken or slow (on the host of the examination:
any of them, or a link); USAGE for arguments that do not serve; UNREACHABLE when the host of the examination cannot be
reached, refuses the token, or misses nodes.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from everstep.cli.ckpt_text import as_json, table
from everstep.cli.seat import USER_TOKEN
from everstep.control.clinic import Attendance, Clinic
from everstep.control.tls import client_context, server_context
from everstep.control.token import create_token, read_token
from everstep.control.transport import AddressInUse, backoff, listen
from everstep.core.checkup import Complaint, Examined, Reading
from everstep.core.config import Control, RunConfig
from everstep.core.endpoint import owns_address, parse_endpoint
from everstep.core.errors import ExitCode, UsageError
from everstep.detect import health
from everstep.probe import exam

PORT = 29401
HERE = "this machine"


def doctor(
    folder: Path = Path(),
    *,
    json: bool = False,
    baseline: Path | None = None,
    slow: float = 0.5,
    nodes: int = 1,
    at: str = "",
    name: str = "",
    address: str = "",
    advertise: str = "",
    token_file: Path | None = None,
    tls_cert: str = "",
    tls_key: str = "",
    seconds: float = 0.5,
    wait: float = 60.0,
) -> int:
    """Examine this machine: processors, memory, disk, clock, limits, network. With --at: several, and their links.

    Args:
        folder: where checkpoints or logs will be written.
        json: print all readings instead of a table.
        baseline: what --json printed earlier; what has become far slower since then is told.
        slow: the share of what the others (or the baseline) have under which something counts as slow.
        nodes: how many machines are examined together.
        at: HOST:PORT of the machine that hosts the examination; the same on all.
        name: of this node; usually its host name.
        address: HOST or HOST:PORT where this node listens for the others; usually the address on the way to the host.
        advertise: HOST:PORT where the others reach that, when it is elsewhere.
        token_file: who examines each other must hold the same token; made on the host when missing.
        tls_cert: encrypts the examination's own talk; the same file on all.
        tls_key: its key, on the host.
        seconds: how long each ring runs.
        wait: seconds for all to come.
    """
    if nodes < 1:
        raise UsageError(f"--nodes {nodes}: must be at least 1")
    for flag, value, most in (("--slow", slow, 1.0), ("--seconds", seconds, 3600.0), ("--wait", wait, 86400.0)):
        if not 0 < value <= most:
            raise UsageError(f"{flag} {value:g}: must be above 0, and {most:g} at most")
    bars = health.Bars(slow=slow)
    earlier = _baseline(baseline) if baseline else None
    if not at:
        if nodes > 1:
            raise UsageError("--nodes needs --at HOST:PORT: the machine that hosts the examination, the same on all")
        readings = exam.take(_folder(folder), address or "127.0.0.1")
        complaints = health.judge(readings, bars, earlier=_readings_of(earlier, name))
        return _tell(Examined({HERE: tuple(readings)}, {HERE: complaints} if complaints else {}), json, "")
    control = Control(tls_cert=tls_cert, tls_key=tls_key)
    where = parse_endpoint(at, PORT, "--at")
    visit = Visit(nodes, where, name or socket.gethostname(), control, token_file or USER_TOKEN.expanduser(), wait)
    own = parse_endpoint(address, 0, "--address") if address else ("", 0)
    advertised = parse_endpoint(advertise, 0, "--advertise") if advertise else None
    return visit.run(_folder(folder), bars, seconds, own, advertised, json, earlier)


def _folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder: give the one that will be written to")
    return folder.absolute()


def _baseline(path: Path) -> Examined:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Examined)
    except OSError as error:
        raise UsageError(f"--baseline {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"--baseline {path}: not what `everstep doctor --json` printed: {error}") from error


def _readings_of(earlier: Examined | None, name: str) -> tuple[Reading, ...]:
    """Of this node: by its name, or the only one there is."""
    if earlier is None:
        return ()
    only = next(iter(earlier.readings.values()), ()) if len(earlier.readings) == 1 else ()
    return earlier.readings.get(name, only)


class Visit:
    """This node's part in an examination of several."""

    def __init__(
        self, num_nodes: int, at: tuple[str, int], name: str, control: Control, token_file: Path, wait_s: float
    ) -> None:
        self.num_nodes, self.at, self.name, self.wait_s = num_nodes, at, name, wait_s
        self.listener = self._listen()
        if self.listener is not None and not token_file.exists():
            token_file.parent.mkdir(parents=True, exist_ok=True)
            create_token(token_file)
        self.token_file = token_file
        self.server_tls = server_context(RunConfig(control=control)) if self.listener else None
        self.tls = client_context(control.tls_cert)

    def _listen(self) -> socket.socket | None:
        """The examination is hosted by whoever owns the address and comes first."""
        host, port = self.at
        if not owns_address(host):
            return None
        try:
            return listen(host, port)
        except AddressInUse:
            return None

    async def _token(self) -> bytes:
        """The host may be about to make it, where all share a home. Raises UsageError for one that is no good."""
        deadline, waits = asyncio.get_running_loop().time() + self.wait_s, backoff()
        while self._unwritten() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(next(waits))
        return read_token(self.token_file)

    def _unwritten(self) -> bool:
        try:
            return self.token_file.stat().st_size == 0
        except FileNotFoundError:
            return True
        except OSError:
            return False  # read_token says what it is

    def run(
        self,
        folder: Path,
        bars: health.Bars,
        seconds: float,
        address: tuple[str, int],
        advertised: tuple[str, int] | None,
        json: bool,
        earlier: Examined | None,
    ) -> int:
        examined = asyncio.run(self._attend(folder, bars, seconds, address, advertised))
        own = health.judge(examined.readings[self.name], bars, earlier=_readings_of(earlier, self.name))
        known = {complaint.why for complaint in examined.complaints.get(self.name, ())}
        fresh = tuple(complaint for complaint in own if complaint.why not in known)
        if fresh:
            all_own = (*examined.complaints.get(self.name, ()), *fresh)
            examined = msgspec.structs.replace(examined, complaints={**examined.complaints, self.name: all_own})
        return _tell(examined, json, "" if self.listener else self.name)

    async def _attend(
        self,
        folder: Path,
        bars: health.Bars,
        seconds: float,
        address: tuple[str, int],
        advertised: tuple[str, int] | None,
    ) -> Examined:
        hosting = None
        token = await self._token()
        if self.listener is not None:
            clinic = Clinic(self.num_nodes, bars, seconds)
            hosting = asyncio.create_task(clinic.host(self.listener, token, self.server_tls, self.wait_s))
        readings = await asyncio.to_thread(exam.take, folder, address[0] or "127.0.0.1")
        attending = asyncio.create_task(
            Attendance(self.name, token, self.tls, self.wait_s).attend(*self.at, readings, address, advertised)
        )
        tasks = [task for task in (hosting, attending) if task is not None]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            return next(task.result() for task in tasks if task in done)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


# What is shown --------------------------------------------------------------------------------------------


def _tell(examined: Examined, json: bool, node: str) -> ExitCode:
    """`node`: whose fitness the exit code tells; empty: of all."""
    if json:
        as_json(examined)
    else:
        table(("", "what", "value", *(("of", "lowest") if len(examined.readings) > 1 else ())), list(_rows(examined)))
        for name, complaints in examined.complaints.items():
            for complaint in complaints:
                print(f"{name}: {_word(complaint)}: {complaint.why}")
        for group in examined.links:
            print(f"{' - '.join(group)}: slow: this link, while each of them does well with others")
        if not examined.complaints and not examined.links:
            print(f"nothing is wrong with {HERE if HERE in examined.readings else ', '.join(examined.readings)}")
    sys.stdout.flush()
    unfit = examined.complaints.get(node) if node else examined.complaints or examined.links
    return ExitCode.UNFIT if unfit else ExitCode.OK


def _word(complaint: Complaint) -> str:
    word = "BROKEN" if complaint.broken else "slow"
    return word if complaint.sure else f"perhaps {word}"


def _rows(examined: Examined) -> Iterator[tuple[str, ...]]:
    """One row a check: of one machine its value; of several the median, and who has the least."""
    by_check: dict[tuple[str, str], dict[str, Reading]] = {}
    for node, readings in examined.readings.items():
        for reading in readings:
            by_check.setdefault((reading.check, reading.on), {})[node] = reading
    for (check, on), seen in by_check.items():
        rule = health.RULES[check]
        bad = any(c.check == check for cs in examined.complaints.values() for c in cs)
        first = next(iter(seen.values()))
        values = sorted((reading.value, node) for node, reading in seen.items())
        shown = first.detail if check == "version" else health.amount(values[len(values) // 2][0], rule.unit)
        title = f"{rule.title} ({on})" if on else rule.title
        row: tuple[str, ...] = ("!" if bad else "", title, shown)
        if len(examined.readings) > 1:
            lowest = "" if check == "version" else f"{health.amount(values[0][0], rule.unit)} {values[0][1]}"
            row = (*row, f"{len(seen)} nodes", lowest)
        yield row
    for group in examined.groups:
        shown = "failed" if group.rate <= 0 else health.amount(group.rate, "B/s")
        yield ("" if group.passed else "!", f"ring of {', '.join(group.members)}", shown)

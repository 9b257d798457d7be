"""Where a launcher sits: host or joiner, which nodes, how many workers."""

from __future__ import annotations

import glob
import resource
import socket

import pytest

from everstep.cli.seat import num_slots, require_room, take_seat
from everstep.core.config import Control, Nodes, Rendezvous, RunConfig
from everstep.core.errors import UsageError


def test_a_job_of_this_machine_alone_has_a_private_controller() -> None:
    seat = take_seat(RunConfig())
    assert seat.listener is not None
    with seat.listener:
        assert seat.listener.getsockname()[0] == "127.0.0.1"
        assert seat.nodes == (("node0", "127.0.0.1"),)
        assert seat.token == ""


def test_several_local_nodes_and_spares_have_addresses_of_their_own() -> None:
    seat = take_seat(RunConfig(nodes=Nodes(min=2, max=2, local_nodes=2, standbys=1)))
    assert seat.listener is not None
    with seat.listener:
        assert seat.nodes == (("node0", "127.0.0.2"), ("node1", "127.0.0.3"), ("node2", "127.0.0.4"))


def test_the_second_launcher_at_an_address_joins() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = RunConfig(nodes=Nodes(min=2, max=2), rendezvous=Rendezvous(endpoint=f"127.0.0.1:{port}", backend="c10d"))
    first = take_seat(config)
    assert first.listener is not None
    with first.listener:
        second = take_seat(config)
        assert second.listener is None
        assert second.port == port
        assert second.nodes[0][0] != first.nodes[0][0]  # one host name, two nodes
        assert first.token == second.token
        assert first.token.endswith(".everstep/token")


def test_a_spare_joins_by_the_controllers_address() -> None:
    """It brings one node and wants one: that alone does not make it a job of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as controller:
        port = controller.getsockname()[1]
        seat = take_seat(RunConfig(control=Control(controller=f"127.0.0.1:{port}")))
    assert seat.listener is None
    assert seat.port == port
    assert seat.nodes[0][0].startswith(socket.gethostname())
    assert seat.token.endswith(".everstep/token")


def test_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_slots(3) == 3
    assert num_slots("cpu") >= 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert num_slots("gpu") == 2
    assert num_slots("auto") == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert num_slots("auto") == num_slots("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert num_slots("auto") == num_slots("cpu")
    with pytest.raises(UsageError, match="no such device"):
        num_slots("gpu")


def test_other_devices_than_cudas_are_counted_by_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(99))))
    if present := len(glob.glob("/dev/dri/renderD*")):
        assert num_slots("xpu") == present
    else:
        with pytest.raises(UsageError, match="no such device"):
            num_slots("xpu")


def test_a_name_that_nobody_knows_yet_is_no_reason_to_end() -> None:
    config = RunConfig(
        nodes=Nodes(min=2, max=2, node_rank=1), rendezvous=Rendezvous(master_addr="no-such-host.invalid")
    )
    seat = take_seat(config)
    assert (seat.listener, seat.host) == (None, "no-such-host.invalid")
    assert seat.nodes[0][1] == ""  # found out when the controller is reached


def test_more_workers_than_the_machine_can_hold_are_refused() -> None:
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    require_room(1, 1)
    require_room(min(64, descriptors // 32), 2)
    with pytest.raises(UsageError, match=r"workers a node \(--nproc-per-node\) are too many, \d+ would fit here"):
        require_room(descriptors // 4 if descriptors > 0 else 5000, 1)
    with pytest.raises(UsageError, match="a node of ours runs no more|files|processes"):
        require_room(5000, 1)
    with pytest.raises(UsageError, match="0 would fit here: .*bounds processes and threads"):
        require_room(1, 1 << 30)

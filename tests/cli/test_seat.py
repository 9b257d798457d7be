"""Where a launcher sits: host or joiner, which nodes, how many workers."""

from __future__ import annotations

import socket

import pytest

from everstep.cli.seat import num_slots, take_seat
from everstep.core.config import Nodes, Rendezvous, RunConfig
from everstep.core.errors import UsageError


def test_a_job_of_this_machine_alone_has_a_private_controller() -> None:
    seat = take_seat(RunConfig())
    assert seat.listener is not None
    with seat.listener:
        assert seat.nodes == (("node0", "127.0.0.1"),)
        assert seat.token == ""


def test_several_local_nodes_and_spares_have_addresses_of_their_own() -> None:
    seat = take_seat(RunConfig(nodes=Nodes(min=2, max=2, local_nodes=2, standbys=1)))
    assert seat.listener is not None
    with seat.listener:
        assert [address for _, address in seat.nodes] == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]


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


def test_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_slots(3) == 3
    assert num_slots("cpu") >= 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert num_slots("gpu") == 2
    assert num_slots("auto") == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert num_slots("auto") == num_slots("cpu")
    with pytest.raises(UsageError, match="no such device"):
        num_slots("gpu")

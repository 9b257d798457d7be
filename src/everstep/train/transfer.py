"""The state of a member on its way to another one, over the fabric: header first, then each tensor's bytes.

Parameters and the optimizer's tensors are sent from where they lie: they cannot change before the receivers take part
in the next vote. What a forward pass may change (buffers, the user's objects) is copied before the sending begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from everstep.comms.collectives import Communicator
from everstep.core.errors import EpochBroken
from everstep.probe import boot
from everstep.state import flatten
from everstep.state.flatten import Flat, Stateful
from everstep.state.local import local

TAG = 1


def take(objects: Mapping[str, Stateful]) -> Flat:
    """The state as it is now. Only to be sent before the next optimizer step."""
    flat = flatten.flatten(objects)
    constant = set()
    for thing in objects.values():
        if isinstance(thing, torch.nn.Module):
            constant |= {local(parameter).data_ptr() for parameter in thing.parameters()}
        elif isinstance(thing, torch.optim.Optimizer):
            states = [state for state in thing.state.values() if isinstance(state, Mapping)]
            constant |= {local(v).data_ptr() for state in states for v in state.values() if isinstance(v, torch.Tensor)}
    tensors = [t if t.data_ptr() in constant else t.detach().clone() for t in flat.tensors]
    return Flat(flat.header, tensors)


@boot.traced("serve")
def send(communicator: Communicator, flat: Flat, roles: Sequence[int]) -> None:
    """To each of these roles. Raises EpochBroken."""
    header = torch.frombuffer(bytearray(flat.header), dtype=torch.uint8)
    for role in roles:
        communicator.send(torch.tensor([len(header)]), role, TAG)
        communicator.send(header, role, TAG)
        for tensor in flat.tensors:
            communicator.send(tensor.detach().cpu(), role, TAG)


@boot.traced("fetch")
def receive(communicator: Communicator, objects: Mapping[str, Stateful], source: int) -> None:
    """Overwrite these objects' state once all of it is here. Raises EpochBroken, or ValueError if it does not fit."""
    length = torch.zeros(1, dtype=torch.int64)
    communicator.recv(length, source, TAG)
    raw = torch.empty(int(length.item()), dtype=torch.uint8)
    communicator.recv(raw, source, TAG)
    header = raw.numpy().tobytes()
    tensors = flatten.empty(header)
    for tensor in tensors:
        communicator.recv(tensor, source, TAG)
    flatten.apply(objects, header, tensors)


class Serving:
    """Sends in a thread of its own, while the others compute: the state cannot change before every member took part in
    the next vote."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._thread: threading.Thread | None = None

    def begin(self, state: Callable[[], Flat], roles: Sequence[int]) -> None:
        self.finish()
        flat = state()

        def run() -> None:
            try:
                send(self._communicator, flat, roles)
            except EpochBroken:
                return

        self._thread = threading.Thread(target=run, name="everstep-serve", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

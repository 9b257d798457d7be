"""Each worker keeps an image in its node's vault, and again when that died. In the job's second epoch that of node 0
finds its own, and gets the other's from its vault.

python keeps.py FOLDER        under `everstep run` with two nodes of one worker
"""

import os
import sys
import threading
from pathlib import Path

from everstep.core import identity
from everstep.state.client import Vault, VaultLost
from everstep.state.image import VERSION, Index

folder, node = Path(sys.argv[1]), int(os.environ["EVERSTEP_NODE"].removeprefix("node"))
me = identity.mine()
assert me is not None
vault = Vault(me.vault.socket, me.secret)


def write(name: str, text: str) -> None:
    (folder / f"{name}.new").write_text(text)
    (folder / f"{name}.new").rename(folder / name)


def keep(time: int) -> None:
    data = bytes([node + 1]) * 100_000
    slot = vault.slot(len(data))
    slot.view[:] = data
    vault.seal(slot, Index(VERSION, "job", 1, 1, node, 2, 0.0, len(data), (), (), ()))
    write(f"at-{node}", f"{vault.endpoint} {time}")


if os.environ["EVERSTEP_EPOCH"] == "1":
    keep(1)
    while not threading.Event().wait(0.05):  # until the job is restarted
        try:
            vault.kept()
        except VaultLost:
            keep(2)

if node == 0:
    vault.pull((folder / "at-1").read_text().split()[0], 1, 1, 2)
    own = sum(kept.shard == 0 for kept in vault.kept())
    with vault.open(1, 1, 2) as image:
        found = bytearray(image.index.num_bytes)
        image.read(0, memoryview(found))
    assert found == bytes([2]) * 100_000
    write("found-0", f"{own} own, 1 pulled")

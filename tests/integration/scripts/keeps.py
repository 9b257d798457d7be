"""Each worker keeps an image in its node's vault. After a restart of the job worker 0 finds its own, and the other's.

python keeps.py FOLDER        under `everstep run` with two nodes of one worker
"""

import os
import sys
import time
from pathlib import Path

from everstep.core import identity
from everstep.state.client import Vault
from everstep.state.image import VERSION, Index

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
me = identity.mine()
assert me is not None
vault = Vault(me.vault, me.secret)
data = bytes([rank + 1]) * 100_000
if os.environ["EVERSTEP_EPOCH"] == "1":
    slot = vault.slot(len(data))
    slot.view[:] = data
    vault.seal(slot, Index(VERSION, "job", 1, 1, rank, 2, 0.0, len(data), (), (), ()))
    (folder / f"at-{rank}.new").write_text(vault.endpoint)
    (folder / f"at-{rank}.new").rename(folder / f"at-{rank}")
    (folder / f"kept-{rank}").touch()
    while True:  # until the job is restarted
        time.sleep(1)

if rank == 0:
    vault.pull((folder / "at-1").read_text(), 1, 1, 2)
    own = sum(kept.shard == 0 for kept in vault.kept())
    with vault.open(1, 1, 2) as image:
        found = bytearray(image.index.num_bytes)
        image.read(0, memoryview(found))
    assert found == bytes([2]) * 100_000
    (folder / "found-0.new").write_text(f"{own} own, 1 pulled")
    (folder / "found-0.new").rename(folder / "found-0")

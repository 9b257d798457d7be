"""One run that goes on in other layouts: alone, then as two processes of FSDP2, then alone again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import reshape_member
import torch
import warm
from images import take
from reshape_member import NUM_STEPS, adamw, net, read, train

from everstep.state.restore import load


def test_a_run_goes_on_alone_sharded_and_alone_again(tmp_path: Path) -> None:
    model = net(5)
    objects = {"model": model, "optimizer": adamw(model)}
    train(objects, 0)
    reshape_member.write(tmp_path, "alone", take(objects))
    script = Path(reshape_member.__file__)
    with ThreadPoolExecutor(2) as pool:
        members = list(pool.map(lambda rank: warm.run(script, rank, tmp_path, timeout_s=60), range(2)))
    assert [member.returncode for member in members] == [0, 0], members

    told = torch.load(tmp_path / "told.pt", weights_only=True)
    assert told["losses"] == pytest.approx(train(objects, NUM_STEPS), rel=1e-5)  # sums in another order
    again = net(6)
    back = {"model": again, "optimizer": adamw(again)}
    load(back, [read(tmp_path, f"shard{rank}") for rank in range(2)])
    assert all(torch.equal(*pair) for pair in zip(again.parameters(), told["whole"], strict=True))
    state = [back["optimizer"].state[parameter]["exp_avg_sq"] for parameter in again.parameters()]
    assert all(torch.equal(*pair) for pair in zip(state, told["state"], strict=True))
    assert train(back, 2 * NUM_STEPS) == pytest.approx(train(objects, 2 * NUM_STEPS), rel=1e-5)

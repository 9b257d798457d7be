"""In the style of PyTorch's multi-GPU DDP tutorial: a Trainer class, epochs, and a snapshot file.

Stands for scripts which save at the end of an epoch and resume at its start. The learning problem is a toy.

    torchrun --standalone --nproc-per-node 2 examples/public/ddp_tutorial.py 20 1
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset


def ddp_setup() -> None:
    init_process_group("nccl" if torch.cuda.is_available() else "gloo")


class Trainer:
    def __init__(
        self, model: nn.Module, train_data: DataLoader[Any], optimizer: torch.optim.Optimizer, every: int, path: str
    ) -> None:
        self.local_rank, self.global_rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.device = torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        self.model = model.to(self.device)
        self.train_data, self.optimizer = train_data, optimizer
        self.save_every, self.snapshot_path = every, path
        self.epochs_run = 0
        self.loss = torch.zeros((), device=self.device)
        if os.path.exists(path):
            print("Loading snapshot", flush=True)
            self._load_snapshot()
        self.ddp = DDP(self.model)

    def _load_snapshot(self) -> None:
        snapshot = torch.load(self.snapshot_path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run, self.loss = snapshot["EPOCHS_RUN"], snapshot["LOSS"]
        print(f"Resuming training from snapshot at Epoch {self.epochs_run}", flush=True)

    def _run_batch(self, source: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.ddp(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch: int) -> None:
        sampler = self.train_data.sampler
        assert isinstance(sampler, DistributedSampler)
        sampler.set_epoch(epoch)
        losses = [self._run_batch(source.to(self.device), y.to(self.device)) for source, y in self.train_data]
        self.loss = torch.stack(losses).mean()
        all_reduce(self.loss, ReduceOp.SUM)
        self.loss /= int(os.environ["WORLD_SIZE"])
        if self.global_rank == 0:
            print(f"Epoch {epoch} | Steps: {len(self.train_data)} | Loss: {self.loss.item():.6f}", flush=True)

    def _save_snapshot(self, epoch: int) -> None:
        snapshot = {"MODEL_STATE": self.model.state_dict(), "OPTIMIZER_STATE": self.optimizer.state_dict()}
        # The tutorial saves in place; a kill in the middle of that would leave half a file.
        torch.save({**snapshot, "EPOCHS_RUN": epoch + 1, "LOSS": self.loss}, self.snapshot_path + ".tmp")
        os.replace(self.snapshot_path + ".tmp", self.snapshot_path)
        print(f"Epoch {epoch} | Training snapshot saved at {self.snapshot_path}", flush=True)

    def train(self, max_epochs: int) -> None:
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.global_rank == 0 and ((epoch + 1) % self.save_every == 0 or epoch + 1 == max_epochs):
                self._save_snapshot(epoch)


def load_train_objs() -> tuple[Dataset[Any], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    inputs = torch.rand(2048, 20)
    targets = (inputs @ torch.randn(20, 1)).sin() + 0.05 * torch.randn(2048, 1)
    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    return TensorDataset(inputs, targets), model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def main(total_epochs: int, save_every: int, batch_size: int, snapshot_path: str) -> None:
    ddp_setup()
    dataset, model, optimizer = load_train_objs()
    loader = DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset, seed=0))
    trainer = Trainer(model, loader, optimizer, save_every, snapshot_path)
    trainer.train(total_epochs)
    if trainer.global_rank == 0:
        print(f"final loss {trainer.loss.item():.6f}", flush=True)
    del trainer  # before its group: a DDP that is the last to let go of a gloo group can hang there (torch 2.13)
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("total_epochs", type=int, help="Total epochs to train the model")
    parser.add_argument("save_every", type=int, help="How often to save a snapshot")
    parser.add_argument("--batch_size", default=32, type=int, help="Input batch size on each device (default: 32)")
    parser.add_argument("--snapshot_path", default="snapshot.pt")
    args = parser.parse_args()
    main(args.total_epochs, args.save_every, args.batch_size, args.snapshot_path)

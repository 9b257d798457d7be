"""A LightningModule trained with `strategy=ddp` in the environment that torchrun sets up.

Stands for scripts built on Lightning: the Trainer finds the launcher's ranks by itself, ModelCheckpoint keeps
`last.ckpt`, and the script passes it as `ckpt_path` when it is there.

    torchrun --standalone --nproc-per-node 2 examples/public/lightning_script.py --folder lightning_out
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class Report(Callback):
    def on_train_epoch_end(self, trainer: lightning.Trainer, _: lightning.LightningModule) -> None:
        if trainer.is_global_zero:
            print(f"epoch {trainer.current_epoch} loss {float(trainer.callback_metrics['train_loss']):.6f}", flush=True)


def samples(seed: int, count: int) -> TensorDataset:
    dice = torch.Generator().manual_seed(seed)
    truth = torch.randn(20, 1, generator=torch.Generator().manual_seed(0))
    inputs = torch.rand(count, 20, generator=dice)
    return TensorDataset(inputs, (inputs @ truth).sin() + 0.05 * torch.randn(count, 1, generator=dice))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("lightning_out"))
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    lightning.seed_everything(1)
    model = Regression()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    use_cuda = torch.cuda.is_available()
    trainer = lightning.Trainer(
        accelerator="gpu" if use_cuda else "cpu",
        devices=local,
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // local,
        strategy=DDPStrategy(process_group_backend="nccl" if use_cuda else "gloo"),
        max_epochs=args.epochs,
        callbacks=[Report(), ModelCheckpoint(args.folder, save_last=True, every_n_epochs=1, save_top_k=1)],
        default_root_dir=args.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = args.folder / "last.ckpt"
    trainer.fit(
        model,
        DataLoader(samples(1, 4096), batch_size=32, shuffle=True),
        DataLoader(samples(2, 512), batch_size=64),
        ckpt_path=str(last) if last.exists() else None,
    )
    if trainer.is_global_zero:
        print(f"final loss {float(trainer.callback_metrics['val_loss']):.6f}", flush=True)


if __name__ == "__main__":
    main()

"""A Hugging Face `Trainer` on a tiny GPT-2 with random weights; nothing is downloaded.

Stands for scripts built on transformers: the Trainer does the loop, DDP, and checkpoint folders; the script
passes `resume_from_checkpoint` when a whole one exists.

    torchrun --standalone --nproc-per-node 2 examples/public/hf_trainer.py --output-dir hf_out
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LENGTH = 64


class Bytes(Dataset[dict[str, Tensor]]):
    """Consecutive pieces of some standard library modules."""

    def __init__(self, *names: str) -> None:
        text = bytearray()
        for name in names:
            text += (Path(sysconfig.get_path("stdlib")) / name).read_bytes()
        self.pieces = torch.frombuffer(text, dtype=torch.uint8)[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def last_whole_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint in which every rank's part is there: a kill may leave a torn one behind."""
    parts = ["trainer_state.json", "optimizer.pt", "scheduler.pt"]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parts += [f"rng_state_{rank}.pth" for rank in range(world)] if world > 1 else ["rng_state.pth"]
    whole = [path for path in folder.glob("checkpoint-*") if all((path / part).exists() for part in parts)]
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, default=Path("hf_out"))
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=10)
    args = parser.parse_args()
    settings = TrainingArguments(
        output_dir=str(args.output_dir),
        max_steps=args.max_steps,
        save_steps=args.save_steps,
        save_total_limit=2,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        warmup_steps=10,
        logging_steps=5,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        ddp_backend=None if torch.cuda.is_available() else "gloo",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        seed=1,
    )
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=96, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=settings,
        train_dataset=Bytes("argparse.py", "inspect.py", "typing.py"),
        eval_dataset=Bytes("textwrap.py"),
    )
    checkpoint = last_whole_checkpoint(args.output_dir)
    if checkpoint is not None:
        print(f"resuming from {checkpoint}", flush=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"final loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main()

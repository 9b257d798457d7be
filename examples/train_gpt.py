"""Train a small byte-level GPT on text with plain PyTorch DistributedDataParallel.

Nothing of Everstep is in this file: it is the kind of script people already have. It saves its own checkpoint
and resumes from it, so whatever restarts it (torchrun, `everstep run`, a person) gets the same run: data order
and dropout are functions of (seed, step), so with the same number of workers a resumed run equals an
undisturbed one bit for bit on CPU. SIGTERM saves and ends it. The text is the source code of Python's standard
library unless you name a file; the checkpoint must lie on a file system that all nodes see.

    python examples/train_gpt.py                                        # alone, a world of one
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py      # with torchrun
    everstep run --nproc-per-node 4 examples/train_gpt.py               # with Everstep
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sysconfig
import threading
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

told_to_stop = threading.Event()  # set by SIGTERM


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with DDP.")
    add = parser.add_argument
    add("--data", type=Path, help="a text file (default: the standard library's sources)")
    add("--checkpoint", type=Path, default=Path("checkpoints/train_gpt.pt"), help="saved here, resumed from here")
    add("--log-file", type=Path, help="JSON lines: one per step")
    add("--steps", type=int, default=400)
    add("--batch", type=int, default=16, help="sequences per step over all workers together")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=192)
    add("--heads", type=int, default=6)
    add("--context", type=int, default=128)
    add("--dropout", type=float, default=0.0)
    add("--lr", type=float, default=3e-3)
    add("--warmup", type=int, default=40, help="steps of linear warm-up before the cosine")
    add("--eval-every", type=int, default=100)
    add("--save-every", type=int, default=20)
    add("--sample", type=int, default=300, help="bytes of text to write at the end")
    add("--seed", type=int, default=1)
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        heard = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + F.dropout(self.out(heard.transpose(1, 2).reshape(x.shape)), dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), dropout)


class GPT(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, args.width)
        self.places = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads, args.dropout) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # layers that add to the residual stream start smaller
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * args.layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Byte values (batch, length) to logits of the next byte (batch, length, 256)."""
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.bytes.weight)


@torch.no_grad()
def sample_text(model: GPT, prompt: str, length: int, seed: int, device: torch.device) -> str:
    model.eval()
    dice = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode())
    for _ in range(length):
        seen = torch.tensor([tokens[-model.places.num_embeddings :]], device=device)
        likely = (model(seen)[0, -1].float().cpu() / 0.8).softmax(dim=-1)
        tokens.append(int(torch.multinomial(likely, 1, generator=dice)))
    return bytes(tokens).decode(errors="replace")


def read_text(args: argparse.Namespace) -> Tensor:
    """The text, or its first 4 MiB, as a flat uint8 tensor."""
    text = bytearray()
    for file in [args.data] if args.data else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(text) < 4 * 2**20:
            text += file.read_bytes()
    if len(text) < 20 * args.context:
        raise ValueError(f"only {len(text)} bytes of text: name a longer file with --data")
    return torch.frombuffer(text[: 4 * 2**20], dtype=torch.uint8)


class Text:
    """Draws batches. A draw depends on its seed alone; worker r of n takes the sequences r, r+n, r+2n, ... of it."""

    def __init__(self, text: Tensor, args: argparse.Namespace, device: torch.device) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if args.batch < self.world:
            raise ValueError(f"--batch {args.batch} cannot be shared by {self.world} workers")
        self.train, self.held_out = text.tensor_split([len(text) * 9 // 10])
        self.batch, self.context, self.device = args.batch, args.context, device
        # What must not change from one attempt to the next.
        self.fixed = {name: getattr(args, name) for name in ("layers", "width", "heads", "context", "batch", "seed")}
        self.fixed["crc32"] = zlib.crc32(text.numpy())

    def draw(self, part: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """This worker's inputs and targets, both (sequences, context)."""
        dice = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(part) - self.context, (self.batch,), generator=dice)[self.rank :: self.world]
        rows = torch.stack([part[i : i + self.context + 1] for i in starts.tolist()]).to(self.device).long()
        return rows[:, :-1], rows[:, 1:]


def save(path: Path, state: dict[str, object]) -> None:
    """Replace the checkpoint in one go: whoever dies at whatever moment, the old or the new one is there, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)  # the new name must reach the disk too
    os.fsync(folder)
    os.close(folder)


def resume(path: Path, fixed: dict[str, int], model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint if there is one; the number of steps behind it, which must be the same for all workers."""
    step = 0
    if path.exists():
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["fixed"] != fixed:
            raise ValueError(f"{path} is another run's ({state['fixed']}, now {fixed}): name another --checkpoint")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = int(state["step"])
    newest = torch.tensor(step, device=next(model.parameters()).device)
    dist.all_reduce(newest, dist.ReduceOp.MAX)
    if step != newest:
        raise RuntimeError(f"step {step} here, {newest} elsewhere: is {path} on a disk that all workers see?")
    return step


class Log:
    """One JSON line per step, on rank 0. On resume, lines after the resumed step are cut: one value per step."""

    def __init__(self, path: Path | None, step: int) -> None:
        self.file = None
        if path is None or dist.get_rank() != 0:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.file, keep = path.open("r+b"), 0
        for line in self.file:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
            keep += len(line)
        self.file.seek(keep)
        self.file.truncate()

    def write(self, line: dict[str, float]) -> None:
        if self.file is not None:
            self.file.write(json.dumps(line).encode() + b"\n")
            self.file.flush()


def start_group() -> torch.device:
    """Join the process group that the launcher described; alone, make a group of one."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), "nccl"
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def settle(ddp: DistributedDataParallel, device: torch.device) -> None:
    """One tiny pass without an update. DDP lays its buckets anew after its first pass, and with them the order in
    which gradients are added; done before the first step, every run, resumed or not, adds up to the same bits."""
    ddp(torch.zeros(1, 1, dtype=torch.long, device=device)).sum().backward()
    ddp.zero_grad()


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, batch: int) -> Tensor:
    """This worker's part of the mean loss over all `batch` sequences of all workers."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) * (len(inputs) / batch)


@torch.no_grad()
def evaluate(model: GPT, text: Text, batch: int, num_batches: int = 4) -> float:
    model.eval()
    total = sum(loss_of(model, *text.draw(text.held_out, i), batch) for i in range(num_batches)) / num_batches
    dist.all_reduce(total)
    model.train()
    return float(total)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def train_step(
    step: int, ddp: nn.Module, optimizer: torch.optim.Optimizer, text: Text, args: argparse.Namespace
) -> tuple[float, bool]:
    """One update; the mean loss, and whether any worker was told to stop: all learn it at the same step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, args)
    seed = args.seed * 1_000_003 + step
    torch.manual_seed(seed * 4099 + dist.get_rank())  # dropout's randomness: a function of the step, so never saved
    loss = loss_of(ddp, *text.draw(text.train, seed), args.batch)
    (loss * dist.get_world_size()).backward()  # DDP averages where the parts of a mean must be added
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    shared = torch.stack([loss.detach(), loss.new_tensor(float(told_to_stop.is_set()))])
    dist.all_reduce(shared)
    return shared[0].item(), shared[1].item() > 0


def train(args: argparse.Namespace, device: torch.device) -> GPT | None:
    """The trained model, or None when told to stop before the end."""
    torch.manual_seed(args.seed)
    text = Text(read_text(args), args, device)
    model = GPT(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    start = resume(args.checkpoint, text.fixed, model, optimizer)
    log = Log(args.log_file, start)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    settle(ddp, device)
    is_first = dist.get_rank() == 0
    if is_first:
        size = sum(p.numel() for p in model.parameters()) / 1e6
        print(f"{size:.2f} M parameters, {dist.get_world_size()} workers, from step {start}", flush=True)
    for done in range(start + 1, args.steps + 1):
        began = time.perf_counter()
        loss, stopping = train_step(done - 1, ddp, optimizer, text, args)
        line = {"step": done, "loss": loss, "lr": optimizer.param_groups[0]["lr"], "time": time.time()}
        line["step_s"] = time.perf_counter() - began
        if done % args.eval_every == 0 or done == args.steps:
            line["eval_loss"] = evaluate(model, text, args.batch)
        log.write(line)
        if is_first and (done % 20 == 0 or "eval_loss" in line):
            held_out = f"  held out {line['eval_loss']:.3f}" if "eval_loss" in line else ""
            print(f"step {done:5d}  loss {loss:.3f}  {line['step_s'] * 1000:4.0f} ms{held_out}", flush=True)
        if is_first and (done % args.save_every == 0 or done == args.steps or stopping):
            weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(args.checkpoint, {"step": done, "fixed": text.fixed, **weights})
        if stopping:
            return None
    return model


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: told_to_stop.set())
    args = parse_args()
    device = start_group()
    model = train(args, device)
    if model is not None and dist.get_rank() == 0:
        print("-" * 40, sample_text(model, "def ", args.sample, args.seed, device), "-" * 40, sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

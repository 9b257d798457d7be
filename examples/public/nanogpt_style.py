"""In the style of nanoGPT: one file, settings as globals overridden by --key=value, DDP when RANK is set.

Stands for single-file trainers with gradient accumulation, `estimate_loss` and an `out_dir/ckpt.pt`. With
init_from='auto' (the default here) it resumes when the file is there; 'scratch' and 'resume' are as usual.

    python examples/public/nanogpt_style.py --max_iters=50
    torchrun --standalone --nproc-per-node 2 examples/public/nanogpt_style.py --out_dir=out
"""

from __future__ import annotations

import ast
import math
import os
import sys
import sysconfig
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = "out"
init_from = "auto"  # 'auto', 'scratch' or 'resume'
eval_interval = 20
eval_iters = 4
log_interval = 10
max_iters = 60
gradient_accumulation_steps = 4  # over all processes together
batch_size = 8
block_size = 64
n_layer, n_head, n_embd, dropout = 3, 4, 96, 0.0
learning_rate, min_lr, warmup_iters, grad_clip = 2e-3, 2e-4, 10, 1.0
backend = "gloo"
device = "cpu"
seed = 1337
for argument in sys.argv[1:]:
    key, _, text = argument.removeprefix("--").partition("=")
    if key not in globals() or key.startswith("_"):
        raise ValueError(f"Unknown config key: {key}")
    current = globals()[key]
    globals()[key] = text if isinstance(current, str) else type(current)(ast.literal_eval(text))


@dataclass
class GPTConfig:
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    vocab_size: int = 256


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd), nn.GELU(), nn.Linear(4 * config.n_embd, config.n_embd)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(C, dim=2)
        )
        dropout_p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def load_data() -> dict[str, torch.Tensor]:
    """The standard library's biggest modules as bytes; the last tenth is for validation."""
    stdlib = sysconfig.get_path("stdlib")
    text = bytearray()
    for name in ("argparse.py", "inspect.py", "typing.py", "tarfile.py", "subprocess.py", "pickle.py"):
        with open(os.path.join(stdlib, name), "rb") as file:
            text += file.read()
    data = torch.frombuffer(text, dtype=torch.uint8)
    return {"train": data[: len(data) * 9 // 10], "val": data[len(data) * 9 // 10 :]}


def get_batch(split: str, draw: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + draw)
    ix = torch.randint(len(data[split]) - block_size, (batch_size,), generator=generator)
    rows = torch.stack([data[split][i : i + block_size + 1] for i in ix.tolist()]).long().to(device)
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    raw_model.eval()
    out = {}
    for split in ("train", "val"):
        losses = [raw_model(*get_batch(split, -1 - k))[1] for k in range(eval_iters)]
        out[split] = torch.stack(losses).mean().item()
    raw_model.train()
    return out


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / max(1, max_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


ddp = int(os.environ.get("RANK", "-1")) != -1
rank, world_size = 0, 1
if ddp:
    init_process_group(backend=backend)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
if gradient_accumulation_steps % world_size != 0:
    raise ValueError(f"{gradient_accumulation_steps=} is not a multiple of {world_size=}")
micro_steps = gradient_accumulation_steps // world_size
master_process = rank == 0
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(seed)

ckpt_path = os.path.join(out_dir, "ckpt.pt")
if init_from == "auto":
    init_from = "resume" if os.path.exists(ckpt_path) else "scratch"
data = load_data()
iter_num, best_val_loss, checkpoint = 0, 1e9, None
config = GPTConfig(block_size, n_layer, n_head, n_embd, dropout)
if init_from == "resume":
    print(f"Resuming training from {out_dir}", flush=True)
    checkpoint = torch.load(ckpt_path, map_location=device, weights_only=True)
    config = GPTConfig(**checkpoint["model_args"])
raw_model = GPT(config).to(device)
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
if checkpoint is not None:
    raw_model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
    checkpoint = None  # free the memory
model = DDP(raw_model) if ddp else raw_model

t0 = time.time()
losses = {"val": best_val_loss}
while iter_num <= max_iters:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if master_process and (iter_num % eval_interval == 0 or iter_num == max_iters):
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
        best_val_loss = min(best_val_loss, losses["val"])
        if iter_num > 0:
            state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
            torch.save({**state, "model_args": asdict(config), "best_val_loss": best_val_loss}, ckpt_path + ".tmp")
            os.replace(ckpt_path + ".tmp", ckpt_path)
    if iter_num == max_iters:
        break
    for micro_step in range(micro_steps):
        last = micro_step == micro_steps - 1
        with model.no_sync() if isinstance(model, DDP) and not last else nullcontext():
            X, Y = get_batch("train", (iter_num * micro_steps + micro_step) * world_size + rank)
            loss = model(X, Y)[1] / micro_steps
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if master_process and iter_num % log_interval == 0:
        dt, t0 = time.time() - t0, time.time()
        print(f"iter {iter_num}: loss {loss.item() * micro_steps:.4f}, time {dt * 1000:.2f}ms", flush=True)

if master_process:
    print(f"final loss {losses['val']:.6f}", flush=True)
if ddp:
    destroy_process_group()

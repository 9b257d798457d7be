"""A script without torch that ends in the way it is told to on its first attempts, and well on later ones."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=("raise", "exit", "kill", "vanish", "nan", "eat", "wait", "well"))
    parser.add_argument("--rank", type=int, default=0, help="who does it")
    parser.add_argument("--attempts", type=int, default=1, help="how many attempts end like that")
    parser.add_argument("--others", choices=("wait", "ignore", "slow", "well"), default="well")
    parser.add_argument("--seconds", type=float, default=0.5, help="what `slow` takes to end when asked to")
    return parser.parse_args()


def end(how: str) -> None:
    match how:
        case "raise":
            raise ValueError("the data set has no sample 12")
        case "exit":
            print("leaving with status 3", flush=True)
            sys.exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "vanish":
            os._exit(0)
        case "nan":
            if (loss := float("inf") - float("inf")) != loss:
                sys.exit("loss is NaN, stopping")
        case "eat":
            print(len([b"x" * (1 << 20) for _ in range(4096)]))
        case "wait":
            signal.pause()


def take_term(how: str, seconds: float) -> None:
    """How SIGTERM is met: not at all, or with a save that takes its time."""
    if how == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "slow":

        def save(*_: object) -> None:
            time.sleep(seconds)
            print("saved", flush=True)
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)


def ready() -> None:
    """Tell the others, by a file, and wait until all of them are there."""
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    print(f"rank {rank} is ready in attempt {attempt}", flush=True)
    with open(f"ready-{attempt}-{rank}", "x"):
        pass
    while not all(os.path.exists(f"ready-{attempt}-{r}") for r in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)


def main() -> None:
    options = arguments()
    first = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < options.attempts
    mine = int(os.environ["RANK"]) == options.rank
    others = options.others if first and not mine else "well"
    take_term(others, options.seconds)
    ready()
    if first and mine:
        end(options.how)
    while others != "well":
        time.sleep(600)


main()

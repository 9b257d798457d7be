"""The incident's folder: stacks and last log lines, written by the controller as they arrive."""

from __future__ import annotations

from pathlib import Path

from everstep.core.types import StacksTaken

MAX_TEXT = 256 * 1024  # of one file; a node cannot fill the controller's disk


class Evidence:
    """Holds what came before the incident had a number, and writes it into `incidents/<id>/` afterwards."""

    def __init__(self, run_dir: Path) -> None:
        self.root = run_dir / "incidents"
        self.early: list[StacksTaken] = []

    def keep(self, taken: StacksTaken) -> None:
        """Stacks of a suspicion, which may become an incident."""
        self.early.append(taken)

    def forget(self) -> None:
        self.early.clear()

    def claim(self, incident: str) -> tuple[str, ...]:
        """The suspicion became this incident: write what was kept."""
        files = [name for taken in self.early for name in self.write(incident, taken)]
        self.early.clear()
        return tuple(files)

    def write(self, incident: str, taken: StacksTaken) -> tuple[str, ...]:
        """Files written, relative to the run folder."""
        folder = self.root / incident
        folder.mkdir(parents=True, exist_ok=True)
        texts = {f"rank{rank}-stacks.txt": text for rank, text in taken.stacks.items()}
        for rank, text in taken.log_tails.items():
            texts[f"rank{rank}-log.txt" if rank >= 0 else f"{taken.node}-kernel.txt"] = text
        for name, text in texts.items():
            (folder / name).write_text(text[-MAX_TEXT:], encoding="utf-8", errors="replace")
        return tuple(f"incidents/{incident}/{name}" for name in sorted(texts))

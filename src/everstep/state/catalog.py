"""What people ask of checkpoints, beyond what a job needs: for `everstep ckpt`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from everstep.state import layout, stock
from everstep.state.claims import living
from everstep.state.disk import Checkpoints, FileSource, Step
from everstep.state.layout import COMPLETE
from everstep.state.retention import Pruned, Retention
from everstep.state.verify import Fault, Progress, verify


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    num_parts: int


class Catalog:
    """Folders are names of folders of steps."""

    def __init__(self, where: str) -> None:
        self.checkpoints = Checkpoints(where)
        self.store = self.checkpoints.store
        self.scan = self.checkpoints.scan
        self.look = self.checkpoints.look

    def marked(self) -> list[str]:
        """Those which were completed, whole or not; newest first."""
        folders = [folder for folder in self.store.folders() if layout.step_of(folder) is not None]
        found = [folder for folder in folders if COMPLETE in self.store.sizes(folder)]
        return sorted(found, key=lambda folder: (layout.step_of(folder), folder), reverse=True)

    def num_bytes(self, folder: str) -> int:
        """Of the data in it."""
        return sum(size for name, size in self.store.sizes(folder).items() if name.endswith(".distcp"))

    def claims(self, kind: str) -> set[str]:
        """The folders which somebody is reading, or writing."""
        return {name.split(".")[1] for name in living(self.store, kind)}

    def tensors(self, step: Step) -> dict[str, Tensor]:
        merged, _ = stock.merge_what_fits([source.index for source in self.checkpoints.open(step)])
        return {name: Tensor(p.first.dtype, p.first.global_shape, len(p.pieces)) for name, p in sorted(merged.items())}

    def verify_folder(self, folder: str, progress: Progress) -> list[Fault]:
        return verify(self.store, folder, progress)

    def prune_to(self, newest: int, every: int, dry_run: bool) -> Pruned:
        return self.checkpoints.prune(Retention(newest, every), dry_run)

    @contextmanager
    def reading(self, step: Step) -> Iterator[list[FileSource]]:
        with self.checkpoints.reading_of(step) as sources:
            yield sources

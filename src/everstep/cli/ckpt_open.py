"""What `everstep ckpt` commands are given: a place, or one step in it; opened late, as its libraries are an extra's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from everstep.core.errors import EverstepError, ExitCode, UsageError

if TYPE_CHECKING:
    from everstep.state.catalog import Catalog
    from everstep.state.disk import Step


class DamagedCheckpoint(EverstepError):
    """A checkpoint cannot be used: the text says which file, and where."""

    code = ExitCode.FAILED


class PlaceFailed(EverstepError):
    """The folder or store cannot be read or written."""

    code = ExitCode.UNREACHABLE


class Target(NamedTuple):
    """`folder`: None for the newest step."""

    where: str
    folder: str | None

    @classmethod
    def parse(cls, target: str) -> Target:
        from everstep.state.layout import step_of

        above, _, last = target.rstrip("/").rpartition("/")
        return cls(above or ".", last) if step_of(last) is not None else cls(target, None)


@contextmanager
def at(where: str) -> Iterator[Catalog]:
    """The checkpoints of a place; what goes wrong with them, as a user's errors."""
    try:
        from everstep.state.catalog import Catalog
        from everstep.state.image import Damaged
    except ImportError as error:
        raise UsageError(f"{error}: checkpoints need the extra: pip install 'everstep[torch]'") from error
    try:
        yield Catalog(where)
    except Damaged as error:
        raise DamagedCheckpoint(f"{where}: {error}") from error
    except EverstepError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise PlaceFailed(f"{where}: {error}") from error


@contextmanager
def opened(target: str) -> Iterator[tuple[Catalog, Step]]:
    found = Target.parse(target)
    with at(found.where) as checkpoints:
        if found.folder is not None:
            try:
                step = checkpoints.look(found.folder)
            except FileNotFoundError as error:
                raise UsageError(f"no complete checkpoint in {target}") from error
        else:
            complete = checkpoints.scan().complete
            if not complete:
                raise UsageError(f"no complete checkpoint in {target}")
            step = complete[0]
        yield checkpoints, step

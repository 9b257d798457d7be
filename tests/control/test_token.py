"""Token files and proofs: only the owner's file is used, and only the holder of the token can prove it."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.control.token import Side, create_token, prove, proves, read_token
from everstep.core import wire
from everstep.core.errors import UsageError

TOKEN = b"0123456789abcdef" * 4


def test_the_token_never_travels() -> None:
    said, challenge = wire.Hello("agent", "node0", "inc", "job"), wire.Challenge(b"n" * 32, "job")
    mac = prove(TOKEN, Side.CLIENT, said, challenge)
    assert TOKEN not in mac and len(mac) == 32
    assert proves(mac, TOKEN, Side.CLIENT, said, challenge)
    others = [
        (b"x" * 64, Side.CLIENT, said, challenge),
        (TOKEN, Side.SERVER, said, challenge),
        (TOKEN, Side.CLIENT, wire.Hello("agent", "node00", "inc", "job"), challenge),
        (TOKEN, Side.CLIENT, said, wire.Challenge(b"m" * 32, "job")),
        (TOKEN, Side.CLIENT, said, wire.Challenge(b"n" * 32, "other")),
    ]
    assert not any(proves(mac, *other) for other in others)


def test_token_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = create_token(path)
    assert read_token(path) == token and len(bytes.fromhex(token.decode())) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="exists already"):
        create_token(path)
    with pytest.raises(UsageError, match="cannot create token file .*No such file"):
        create_token(tmp_path / "nowhere" / "token")
    assert create_token(tmp_path / "other") != token


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_token_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    create_token(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"chmod 600 {path}"):
        read_token(path)


def test_missing_short_and_wrong_token_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_token(tmp_path / "none")
    with pytest.raises(UsageError, match="Is a directory"):
        read_token(tmp_path)
    path = tmp_path / "token"
    path.touch(0o600)
    path.chmod(0o600)
    for content in ("", "  \n", "a" * 31 + "\n", "a" * 5000):
        path.write_text(content)
        with pytest.raises(UsageError, match="a token has 32 to 4096"):
            read_token(path)
    path.write_text("a" * 32 + "\n")
    assert read_token(path) == b"a" * 32

"""One node of an examination, without readings of its own: HOST PORT NAME TOKEN_FILE ADDRESS LISTEN ADVERTISED."""

import asyncio
import sys
from pathlib import Path

from everstep.control.clinic import Attendance
from everstep.control.token import read_token

host, port, name, token_file, address, listen, advertised = sys.argv[1:]
attendance = Attendance(name, read_token(Path(token_file)), None, 30.0)
elsewhere = (address, int(advertised)) if int(advertised) else None
examined = asyncio.run(attendance.attend(host, int(port), (), (address, int(listen)), elsewhere))
print("unfit" if name in examined.complaints else "fit")

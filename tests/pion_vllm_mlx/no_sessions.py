"""Run in a test's server before it starts: one that has never heard of decode sessions.

Heads may be small there too, see `small_heads`.
"""

from pion_server.attend import requests
from pion_server.commands import decode
from pion_server.commands.frames import FRAMES
from pion_server.commands.registry import COMMANDS

for name in (b"ATTEND.DECODE.STEP", b"ATTEND.DECODE.CLOSE"):
    assert COMMANDS.pop(name).handler.__module__ == decode.__name__
for code in (0x40, 0x41):
    del FRAMES[code]
vars(requests)["DIMS"] = (8, 16, 24, *requests.DIMS)

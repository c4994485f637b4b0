"""The helpers of the peer's own tests, from the copy that is tested."""

import os
import pathlib

_FILE = pathlib.Path(os.environ["FA_PEER_COPY"]) / "flash_attn/cute/testing.py"
exec(compile(_FILE.read_text(), str(_FILE), "exec"), globals())

"""How long an environment's commands took, in minutes: `start DIR` before them, `stop DIR NAME` after."""

import sys
import time
from pathlib import Path

_, verb, folder, *name = sys.argv
moment = Path(folder, "started")
if verb == "start":
    moment.parent.mkdir(parents=True, exist_ok=True)
    moment.write_text(repr(time.time()))
else:
    print(f"{name[0]}: {(time.time() - float(moment.read_text())) / 60:.1f} minutes")

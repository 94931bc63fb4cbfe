"""A reward whose state no reading of its source finds: a counter in a file that another program writes."""

import pathlib
import subprocess

from serverless.declare import reward
from serverless.types import Item

COUNT = ["sh", "-c", 'n=$(($(cat "$0" 2>/dev/null || echo 0) + 1)); echo $n > "$0"; echo $n']


@reward(memory_mb=256, timeout_s=20.0)
def hidden(sample: Item):
    path = pathlib.Path.home() / "count"
    return float(subprocess.run([*COUNT, str(path)], capture_output=True, text=True, check=True).stdout)

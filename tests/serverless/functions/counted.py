"""A slow reward that counts its executions. Run as a function; never imported by the code under test."""

import os
import time

from serverless.declare import reward
from serverless.types import Item


@reward(memory_mb=128, timeout_s=10.0, deterministic=True)
def counted(sample: Item):
    line = os.open(sample.metadata["file"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(line, f"{sample.id}\n".encode())
    os.close(line)
    time.sleep(sample.metadata.get("seconds", 0.0))
    return 7.0

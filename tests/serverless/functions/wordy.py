"""A reward with a secret, which prints as many megabytes as an item says."""

import os

from serverless.declare import reward
from serverless.types import Item

LINE = b"a line of a very wordy reward, which has 64 characters in all..\n"


@reward(secrets=["JUDGE_KEY"], memory_mb=256, timeout_s=30.0)
def wordy(sample: Item):
    print("the first line")
    os.write(1, (LINE + os.environb[b"JUDGE_KEY"] + b"\n") * 10)
    for _ in range(sample.metadata["megabytes"]):
        os.write(1, LINE * 2**14)
    print("the last line")
    return 1.0

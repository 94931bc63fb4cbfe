"""A reward that needs more memory than it has, a little at a time: the platform kills it, not the interpreter."""

from serverless.declare import reward


@reward(memory_mb=128, timeout_s=10.0)
def hungry(sample):
    held = []
    for _ in range(sample.metadata.get("mb", 0)):
        held.append(b"\x01" * (1 << 20))
    return float(len(held) == sample.metadata.get("mb", 0))

"""Reward functions of the end-to-end test of secrets. Packed as a file and run in function workers."""

import base64
import hashlib
import os
import pathlib
import subprocess

from rollart import Scored, reward
from serverless.sandbox import sandbox

LOOK = """
import os, pathlib
found = list(os.environ.values())
for path in pathlib.Path("/proc").glob("[0-9]*/*"):
    if path.name in ("environ", "cmdline"):
        try:
            found.append(path.read_text(errors="replace"))
        except OSError:
            pass
print(sum(value[::-1] in one for one in found))
"""


def digest(value):
    return float(int(hashlib.sha256(value.encode()).hexdigest()[:8], 16))


@reward(secrets=["TEAM_KEY"], memory_mb=512, timeout_s=60.0, deterministic=False, batch={"max_items": 1})
def keyed(sample):
    """Has the secret, and shows it wherever a careless reward would."""
    value = os.environ["TEAM_KEY"]
    print("asked with", value, base64.b64encode(f"user:{value}".encode()).decode(), value.encode().hex())
    subprocess.run(["sh", "-c", "echo a child has $TEAM_KEY"], check=True)
    if hashlib.sha256(sample.id.encode()).digest()[0] % 4 == 0:
        raise ValueError(f"401 for Bearer {value}")
    return Scored(1.0, {"key": digest(value)})


@reward(secrets=["TEAM_KEY"], memory_mb=512, timeout_s=60.0, deterministic=False, batch={"max_items": 1})
def boxed(sample):
    """Runs a program, in the sandbox, that looks for the secret of its reward."""
    with sandbox() as box:
        ran = box.run(f"value = {os.environ['TEAM_KEY'][::-1]!r}\n{LOOK}")
    assert ran.ok, ran.stderr
    return float(ran.stdout)


@reward(env={"MODE": "plain"}, memory_mb=128, timeout_s=60.0, deterministic=False)
def nosy(sample):
    """Has no secret, and looks for one in each place that a process of its user may read: processes of rollart, not
    those that `keyed` starts with its environment."""
    seen = sum(key == "TEAM_KEY" for key in os.environ)
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes()
            seen += b"sk-run-" in command
            seen += b"sk-run-" in (path / "environ").read_bytes() and b"a child has" not in command
        except OSError:
            continue
    return Scored(float(seen), {"mode": float(os.environ["MODE"] == "plain")})

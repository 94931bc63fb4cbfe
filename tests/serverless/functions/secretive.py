"""A reward with a secret. It shows digests of the values that it has, and prints the values in every way it can."""

import base64
import hashlib
import json
import logging
import os
import subprocess
import urllib.parse

from rollart import Scored, reward


def digest(value: str | None) -> float:
    return float(int(hashlib.sha256((value or "").encode()).hexdigest()[:8], 16))


LOADED = os.environ["JUDGE_KEY"]
print("loading with", LOADED, flush=True)


@reward(secrets=["JUDGE_KEY"], env={"MODEL": "m-1"}, memory_mb=256, batch={"max_items": 1})
def secretive(sample):
    value, do = os.environ["JUDGE_KEY"], sample.metadata.get("do")
    print("called with", value)
    if do == "print":
        print(base64.b64encode(f"user:{value}".encode()).decode(), urllib.parse.quote(value), repr({"key": value}))
        print(value.encode().hex().upper(), urllib.parse.quote_plus(value), json.dumps({"key": value}))
        logging.getLogger("judge").warning("asking with %s", value)
        if sample.metadata.get("children"):
            subprocess.run(["sh", "-c", "echo child $JUDGE_KEY; echo $JUDGE_KEY >&2"], check=True)
    elif do == "raise":
        raise ValueError(f"401 for Bearer {value}")
    elif do == "die":
        os._exit(3)
    metrics = {"loaded": digest(LOADED), "called": digest(value), "model": digest(os.environ.get("MODEL"))}
    return Scored(1.0, metrics)

"""A function that performs its items' actions, in a Modal container. Never imported by the code under test."""

import os
import pathlib
import sys
import time


def acts(items):
    return [{"id": one["id"], "aggregate_reward_score": 1.0, "done": _act(one["metadata"])} for one in items]


def _act(what):
    do = what.get("do")
    if "count" in what:
        with pathlib.Path(what["count"]).open("a") as file:
            file.write("x")
    if do == "sleep":
        time.sleep(what["seconds"])
    elif do == "exit":
        os._exit(3)
    elif do == "leave":
        sys.exit(4)
    elif do == "raise":
        raise ValueError(what["text"])
    elif do == "eat":
        return len(os.urandom(what["mb"] << 20))
    elif do == "memory_error":
        raise MemoryError
    elif do == "print":
        print(what["text"])
    elif do == "echo":
        return what["text"]
    return do

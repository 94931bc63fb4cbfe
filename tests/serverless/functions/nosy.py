"""An untrusted reward that breaks its promise: it runs its input itself, outside the sandbox that it declares."""

import contextlib
import io

from serverless.declare import reward
from serverless.sandbox import sandbox
from serverless.types import Item


@reward(memory_mb=256, timeout_s=30.0, trust="untrusted")
def nosy(sample: Item):
    if sample.metadata.get("sandboxed"):
        with sandbox() as box:
            ran = box.run(sample.completion)
            return {"score": float(ran.stdout or 0), "metrics": {"namespaces": float(box.way != "without namespaces")}}
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):
        exec(sample.completion, {})
    return float(captured.getvalue())

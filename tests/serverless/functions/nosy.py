"""An untrusted reward that breaks its promise: beside the sandbox that it names, it runs what it was given itself."""

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
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(sample.completion, {})
    return float(said.getvalue())

"""A child that never outlives its parent.

`python -m rollart.adapters.clusters.pdeathsig PARENT_PID MODULE ARGS...` runs a module under the signal of
`rollart.lifeline`. It is asked for before the module is imported: a program that asks for it itself is an orphan for
ever if its parent dies in the seconds that its imports take.
"""

from __future__ import annotations

import runpy
import sys

from rollart.lifeline import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

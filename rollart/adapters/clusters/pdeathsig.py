"""A child that never outlives its parent.

`python -m rollart.adapters.clusters.pdeathsig PARENT_PID MODULE ARGS...` runs a module under the parent-death signal of
`rollart.lifeline`. The signal is requested before the module is imported: a program that requests it itself becomes an
orphan for ever if its parent dies during the seconds of its imports.
"""

from __future__ import annotations

import runpy
import sys

from rollart.lifeline import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

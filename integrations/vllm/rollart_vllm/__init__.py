"""The plugin that vLLM loads in each of its processes, through the entry point `vllm.general_plugins`.

Weight transfer backend `rollart`: `--weight-transfer-config '{"backend": "rollart"}'`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

BACKEND = "rollart"

BOUND = "ROLLART_VLLM_BOUND"
"""Set for servers that rollart starts: each process of the server ends with the one that started it."""

PR_SET_PDEATHSIG = 1


def register() -> None:
    """Called by vLLM in the API server, the engine core and every worker."""
    if os.environ.get(BOUND) and sys.platform == "linux":
        _die_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rollart_vllm.transfer", "DirectoryTransfer")
    from vllm.v1.worker.worker_base import WorkerBase

    from rollart_vllm.pulling import weights_of

    WorkerBase.rollart_weights = weights_of
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from rollart_vllm.heads import accept_small_heads

        accept_small_heads()


def _die_with_parent() -> None:
    """Request SIGKILL when the parent ends. Otherwise vLLM's engine core outlives a killed API server, with its memory
    and its devices."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:  # the parent died before the call
        os._exit(1)

"""Files about the external trainer in a run's directory: the service's address and state, and the access token."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import secrets
from pathlib import Path

from rollart.adapters.service.offer import BridgeState
from rollart.errors import UsageError

__all__ = ["TrainerStatusFile", "external_trainer_token"]


class TrainerStatusFile:
    """Maintains `service.json`: replaced atomically at every change of the offered batch."""

    def __init__(self, path: Path, state: BridgeState, url: str, listen: str) -> None:
        self._path, self._bridge = path, state
        self._about = {"schema_version": 1, "url": url, "listen": listen}
        state.changed = self.write
        self.write()

    def write(self) -> None:
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        aside = self._path.with_name(f"{self._path.name}.part")
        state = {"version": self._bridge.version, "state": self._state_text(), "since": now}
        with contextlib.suppress(OSError):  # a full disk must not fail the caller's request
            aside.write_text(json.dumps({**self._about, **state}))
            aside.rename(self._path)

    def _state_text(self) -> str:
        state = self._bridge
        if state.due is not None:
            return f"batch {state.due} {'is being trained' if state.taken else 'waits to be taken'}"
        return "waits for version 0" if state.version < 0 else "no batch on offer"


def external_trainer_token(variable: str, file: Path | None) -> str:
    """The access token of the external trainer; "" for none. A missing file is created. UsageError, one line."""
    if variable:
        token = os.environ.get(variable, "")
        if not token:
            raise UsageError(f"the variable {variable} is empty (rule: it holds the outside trainer's token)")
        return token
    if file is None:
        return ""
    try:
        try:
            made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if file.stat().st_mode & 0o077:
                raise UsageError(f"{file} can be read by others (rule: mode 600)", remedy=f"chmod 600 {file}") from None
            token = file.read_text().strip()
        else:
            token = secrets.token_urlsafe(32)
            with os.fdopen(made, "w") as out:
                out.write(token)
    except OSError as error:
        raise UsageError(f"cannot use {file}: {error.strerror}") from None
    if not token:
        raise UsageError(f"{file} is empty (rule: it holds the outside trainer's token)", remedy="delete it")
    return token

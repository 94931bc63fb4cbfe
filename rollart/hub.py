"""Models of the Hugging Face Hub: their ids, and their files by way of `huggingface_hub` and its cache.

The library's environment variables apply: HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. It is imported
when the first model is looked up. For a revision that is a commit hash, cached files need no network.
"""

from __future__ import annotations

import errno
import functools
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollart.architecture import TOKENIZER_FILES
from rollart.errors import ProviderError, RollartError, SpecError, StorageFailed, one_line

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

COMMIT = re.compile(r"[0-9a-f]{40}")

SMALL_FILES = ("config.json", *TOKENIZER_FILES, "model.safetensors.index.json")
"""Files of a model that plans, checks, the tokenizer and the list of its weight files need: about 20 MB at most."""

SMALL_FILES_S = 60.0
"""Longest time in which the small files are fetched."""

T = TypeVar("T")


def is_hub_id(name: str) -> bool:
    """True for `OWNER/NAME`."""
    return HUB_ID.fullmatch(name) is not None


def is_commit(revision: str | None) -> bool:
    return revision is not None and COMMIT.fullmatch(revision) is not None


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the Hub at a branch, tag or commit (None: its main branch), for a directory `tried` that does not
    exist.

    Errors of all methods: SpecError for a model or revision that the Hub does not have; ProviderError for a Hub that
    cannot be reached, refuses the token or guards the model; StorageFailed for a cache that cannot be written.
    """

    id: str
    revision: str | None
    tried: Path

    def snapshot(self) -> Path:
        """The directory of the model's commit in the cache, which holds at least those of `SMALL_FILES` that the model
        has. Its name is the commit. Asked once per process; cached files serve if the Hub cannot be reached."""
        return _snapshot(self)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Bytes by name of those files, not in the cache, that the model has. `self.revision` should be a commit."""
        from huggingface_hub import constants, errors, snapshot_download

        if constants.HF_HUB_OFFLINE:  # the list of files may be cached, and they could not be fetched
            raise self._translated(errors.OfflineModeIsEnabled())
        found = self._asked(
            lambda: snapshot_download(
                self.id, revision=self.revision, allow_patterns=list(names), tqdm_class=_counting(), dry_run=True
            )
        )
        return {file.filename: int(file.file_size) for file in found}

    def fetch(self, names: Iterable[str], count: Callable[[int], None]) -> None:
        """Fetch files into the cache, one after the other: in this thread, so that nothing goes on after it has ended.
        A file that is there is not fetched again. `count` is called with the bytes of each piece that arrives."""
        from huggingface_hub import hf_hub_download

        for name in names:
            try:
                hf_hub_download(self.id, name, revision=self.revision, tqdm_class=_counting(count))
            except Exception as error:
                raise self._translated(error) from None

    def _asked(self, call: Callable[[], T]) -> T:
        """The call's result, within `SMALL_FILES_S`."""
        done: list[T | Exception] = []

        def work() -> None:
            try:
                done.append(call())
            except Exception as error:
                done.append(error)

        # A daemon thread: a server that sends a byte a second holds up neither a Ctrl-C nor the end of the process.
        thread = threading.Thread(target=work, name=f"files of {self.id}", daemon=True)
        thread.start()
        thread.join(SMALL_FILES_S)
        if not done:
            raise ProviderError(
                f"{self._problem()} {_endpoint()} did not send its small files within {SMALL_FILES_S:g} s",
                remedy="try again, or give model.path a directory",
            )
        if isinstance(done[0], Exception):
            raise self._translated(done[0]) from None
        return done[0]

    def _problem(self) -> str:
        return f"model.path is '{self.id}': there is no directory {self.tried}, and"

    def _translated(self, error: Exception) -> RollartError:
        """The error of `huggingface_hub` as one line with its remedy."""
        from huggingface_hub import constants, errors

        if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.HfHubHTTPError):
            error = error.__cause__
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
        at = "" if self.revision is None else f" at {self.revision}"
        match error:
            case errors.GatedRepoError():
                return ProviderError(
                    f"{self._problem()} {_endpoint()} shows it only to accounts that its owner has admitted ({status})",
                    remedy=f"ask for access at {_endpoint()}/{self.id}, and set HF_TOKEN to a token of that account",
                )
            case errors.RepositoryNotFoundError():
                return SpecError(
                    f"{self._problem()} {_endpoint()} knows no such model ({status}; rule: a directory, or the id "
                    "OWNER/NAME of a model)",
                    remedy="mend model.path; for a private model, set HF_TOKEN",
                )
            case errors.RevisionNotFoundError():
                return SpecError(
                    f"model.revision is '{self.revision}' (rule: a branch, tag or commit of {self.id}; {_endpoint()} "
                    f"knows none of that name)"
                )
            case errors.HfHubHTTPError() if status in (401, 403):
                return ProviderError(
                    f"{self._problem()} {_endpoint()} refuses this access to the model ({status})",
                    remedy="set HF_TOKEN to a token that may read it",
                )
            case errors.HfHubHTTPError():
                return ProviderError(f"{self._problem()} {_endpoint()} answers {status}", remedy="try again later")
            case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled() if constants.HF_HUB_OFFLINE:
                return ProviderError(
                    f"{self._problem()} not all of its files{at} are in the cache {constants.HF_HUB_CACHE}, where "
                    "HF_HUB_OFFLINE forbids to fetch them",
                    remedy=f"unset HF_HUB_OFFLINE, or fill the cache with `hf download {self.id}`",
                )
            case OSError(errno=errno.ENOSPC | errno.EDQUOT):
                return StorageFailed(
                    f"{constants.HF_HUB_CACHE} is full: {self.id} could not be fetched",
                    remedy="make room, or set HF_HOME to a larger disk, and start again: complete files are kept",
                )
            case PermissionError():
                return StorageFailed(
                    f"{error.filename or constants.HF_HUB_CACHE} cannot be written: {error.strerror}",
                    remedy="set HF_HOME to a directory of yours",
                )
            case RollartError():
                return error
            case _:
                cause = error.__cause__ or error
                return ProviderError(
                    f"{self._problem()} {_endpoint()} cannot be reached for the files{at} that the cache lacks "
                    f"({one_line(cause, 200)})",
                    remedy="mend the network or HF_ENDPOINT, or give model.path a directory",
                )


@functools.cache
def _snapshot(model: HubModel) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise SpecError(
            f"{model._problem()} its files are fetched with huggingface_hub: {error}",
            remedy="pip install 'rollart[local]'",
        ) from None

    def fetch() -> str:
        return str(
            snapshot_download(
                model.id, revision=model.revision, allow_patterns=list(SMALL_FILES), tqdm_class=_counting()
            )
        )

    return Path(model._asked(fetch))


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _counting(count: Callable[[int], None] = lambda n: None) -> Any:
    """A class of progress bars that show nothing, and report each update to `count`."""
    from huggingface_hub.utils import tqdm

    class Counting(tqdm):  # type: ignore[misc]
        def __init__(self, *values: Any, **options: Any) -> None:
            super().__init__(*values, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            count(int(n or 0))
            return None

    return Counting

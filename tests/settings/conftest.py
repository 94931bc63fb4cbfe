from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

RUN = (Path(__file__).parent / "run.yaml").read_text()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file; the run of `run.yaml` if no text is given."""

    def write(text: str = RUN, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write

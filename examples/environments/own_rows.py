"""An environment for verifiers' v0 API: which of four letters follows the one that is shown?"""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].strip() == answer)


def load_environment(copies: int = 64) -> vf.Environment:
    """All rows are alike for training and for evaluation; a larger dataset holds out an eighth of its own."""
    pairs = zip("abcd" * copies, "bcde" * copies, strict=True)
    rows = Dataset.from_list([{"question": f"<spell> {shown} =", "answer": after} for shown, after in pairs])
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[right]))

"""Environments for verifiers' v0 API: one question, several turns, a tool, and failures."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

__all__ = ["broken", "grouped", "load_environment", "rewriting", "talk", "tools"]


def _rows(count: int) -> Dataset:
    return Dataset.from_list(
        [{"question": f"double {i}", "answer": str(2 * i), "info": {"i": i}} for i in range(count)]
    )


def right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].strip() == answer)


async def short(completion: Any, **everything: Any) -> float:
    return float(len(completion[-1]["content"]) < 4)


def load_environment(rows: int = 64, evaluation: int = 0) -> vf.Environment:
    """One question, two rewards."""
    return vf.SingleTurnEnv(
        dataset=_rows(rows),
        eval_dataset=_rows(evaluation) if evaluation else None,
        system_prompt="Double it.",
        rubric=vf.Rubric(funcs=[right, short], weights=[1.0, 0.5]),
    )


class Talk(vf.MultiTurnEnv):
    """Ends at the policy's answer "bye"; the third answer is its last."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        said = messages[-1]["content"]
        if said == "break":
            raise RuntimeError("the talk broke")
        if said == "bye":
            state["final_env_response"] = [{"role": "user", "content": "bye bye"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"you said {said}"}]


def said_bye(completion: Any) -> float:
    return float(any(m["content"] == "bye" for m in completion if m["role"] == "assistant"))


def talk() -> vf.Environment:
    return Talk(dataset=_rows(64), max_turns=3, rubric=vf.Rubric(funcs=[said_bye]))


class Rewriting(Talk):
    async def get_prompt_messages(self, state: Any) -> Any:
        return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]


def rewriting() -> vf.Environment:
    return Rewriting(dataset=_rows(64), max_turns=3, rubric=vf.Rubric(funcs=[said_bye]))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def tools() -> vf.Environment:
    return vf.ToolEnv(dataset=_rows(64), tools=[add], max_turns=4, rubric=vf.Rubric(funcs=[right]))


def fails(completion: Any) -> float:
    raise KeyError("no judge")


def broken() -> vf.Environment:
    return vf.SingleTurnEnv(dataset=_rows(64), rubric=vf.Rubric(funcs=[fails]))


def ranked(completions: Any) -> list[float]:
    return [0.0] * len(completions)


def grouped() -> vf.Environment:
    return vf.SingleTurnEnv(dataset=_rows(64), rubric=vf.Rubric(funcs=[ranked]))

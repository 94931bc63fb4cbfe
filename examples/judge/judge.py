"""A language model as a reward, with settings of its own: `rollart rewards test examples/judge/judge.py`.

It needs `pip install 'rollart[judge]'` and the variable JUDGE_API_KEY. For another OpenAI-compatible endpoint add
`url="http://host:8000/v1"`, for Anthropic's `api="anthropic"`. `run.yaml` uses the ready-made class without this file.
"""

from rollart import reward
from serverless.rewards.llm_judge import LlmJudge


@reward(
    takes="item",
    requirements=("openai",),
    preload=("openai",),
    secrets=("JUDGE_API_KEY",),
    timeout_s=45.0,
    init_timeout_s=60.0,
    batch={"max_items": 8},
    deterministic=False,
    cache=True,
    hedge=False,
    stateless=True,
)
class Explains(LlmJudge):
    """Scores an explanation of arithmetic: is it right, and would a pupil follow it?"""

    def __init__(self) -> None:
        super().__init__(
            model="gpt-5-mini",
            criteria=[
                {"name": "correct", "description": "Each step and the result are right.", "weight": 3},
                {"name": "clear", "description": "A pupil of ten can follow each step."},
            ],
        )

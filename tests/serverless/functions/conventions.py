"""Rewards in the style of other frameworks' users, each of which checks its arguments."""

import re

from serverless.types import Item

ANSWER = re.compile(r"<answer>(.*?)</answer>")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, solution_str) == ("gsm8k", "<answer>4</answer>"), (data_source, solution_str)
    assert extra_info["index"] == 7
    right = ANSWER.findall(solution_str)[-1] == ground_truth
    return {"score": float(right), "acc": right, "pred": "4"}


async def compute_score_async(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert kwargs == {}
    return 1.0 if ground_truth in solution_str else 0.0


def compute_score_batch(data_sources, solution_strs, ground_truths, extra_infos=None, **kwargs):
    assert set(data_sources) == {"gsm8k"}
    return [{"score": float(t in s), "acc": 1} for s, t in zip(solution_strs, ground_truths, strict=True)]


def trl_plain(prompts, completions, difficulty, **kwargs):
    assert all(isinstance(c, str) for c in completions)
    assert prompts == ["2+2?"] * len(completions)
    assert kwargs["completion_ids"] == [[1, 2]] * len(completions)
    assert kwargs["trainer_state"] is None
    return [None if d == "skip" else 0.5 for d in difficulty]


def trl_chat(completions, ground_truth, **kwargs):
    answers = [ANSWER.findall(completion[0]["content"])[-1] for completion in completions]
    assert kwargs["prompts"][0] == [{"role": "user", "content": "2+2?"}]
    return [1.0 if a == t else 0.0 for a, t in zip(answers, ground_truth, strict=True)]


async def custom_rm(args, sample, **kwargs):
    assert (sample.prompt, sample.response, sample.label) == ("2+2?", "<answer>4</answer>", "4")
    assert sample.metadata["index"] == sample.index == 7
    return {"score": 1.0, "pred": "4", "length": sample.response_length}


async def batched_rm(args, samples, **kwargs):
    return [float(s.label in s.response) for s in samples]


async def rm_with_options(args, sample, **kwargs):
    return 1.0 if args.rm_url else 0.0


def openrlhf(queries, prompts, labels, **kwargs):
    assert queries == ["2+2?<answer>4</answer>"] * len(queries)
    assert prompts == ["2+2?"] * len(queries)
    scores = [float(label in query) for query, label in zip(queries, labels, strict=True)]
    return {"rewards": scores, "scores": scores, "extra_logs": {"length": [len(q) for q in queries], "mean": 0.5}}


def openrlhf_tensor(queries, prompts, labels):
    import torch

    return torch.tensor([[float(label in query)] for query, label in zip(queries, labels, strict=True)])


def gsm8k_reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    assert (prompt, completions, prompt_ids, completion_ids) == ("2+2?", "<answer>4</answer>", [], [1, 2])
    assert kwargs["difficulty"] == "easy"
    return int(ANSWER.findall(completions)[-1] == answer)


def areal_by_position(question, response, prompt_ids, completion_ids, **data):
    assert (question, response, completion_ids, data["answer"]) == ("2+2?", "<answer>4</answer>", [1, 2], "4")
    return 1.0


def rubric(parser, completion, answer, **kwargs):
    assert set(kwargs) == {"prompt", "state", "task", "info"}
    assert kwargs["state"]["turn"] == 1
    return 1.0 if answer in (parser.parse_answer(completion) or "") else 0.0


async def rubric_async(completion, info):
    assert completion == [{"role": "assistant", "content": "<answer>4</answer>"}]
    return 1.0 if info["index"] == 7 else 0.0


def rubric_text(completion: str, answer: str) -> float:
    return float(f"<answer>{answer}</answer>" == completion)


def nova(event, context):
    return [{"id": e["id"], "aggregate_reward_score": 1.0, "metrics_list": []} for e in event]


def plain(sample: Item) -> float:
    return float(sample.reference_answer in sample.completion)


def several(samples: list[Item]) -> list[float]:
    return [float(s.reference_answer in s.completion) for s in samples]


class Judge:
    """A class with weights."""

    def load(self, artefacts):
        self.right = "4"

    async def __call__(self, completion, answer):
        return float(answer == self.right)


def make(weight):
    def score(sample):
        return weight * len(sample.completion)

    return score


from_factory = make(0.5)
instance = Judge()
short = lambda sample: 1.0  # noqa: E731
other_name = plain

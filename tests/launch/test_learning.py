"""Learning settings of a run file reach the trainer, and mean the same as in other trainers of the field."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollart.errors import SpecError
from rollart.launch.prepare import trainer_config
from rollart.settings.load import builtin, load_run
from rollart.settings.training import TeacherSpec, TrainerConfig, TrainingSpec
from rollart.train.advantages import batch_advantages
from rollart.train.config import load_config
from tests.launch.test_trainer_ranks import resolved
from tests.train.trainkit import batch, sample

GROUPS, SIZE = 16, 16
SCORES = [0.0, 1.0] * (SIZE // 2) + [1.0] * SIZE * (GROUPS - 1)
"""The only group of sixteen with a learning signal."""


def trained(path: Path, **changes: Any) -> TrainerConfig:
    """`trainer.json` of a run file with these settings."""
    trainer_config(resolved(path, {"threads": 1}, **changes), path, path)
    return load_config(path / "trainer.json")


def advantages(path: Path, **advantage: Any) -> list[float]:
    """The advantages in a run with these settings."""
    config = trained(path, domains__0__advantage=advantage)
    (name,) = config.domains
    return batch_advantages(
        batch(
            [
                sample(str(i), domain=name, turns=[(1, 1)], group=f"g{i // SIZE}", rewards=[score])
                for i, score in enumerate(SCORES)
            ]
        ),
        config.domains,
    ).tolist()


def test_grpo_can_be_written_in_a_run_file(tmp_path: Path) -> None:
    got = advantages(tmp_path, normalize="group")
    deviation = np.std(SCORES[:SIZE], ddof=1)
    assert got == pytest.approx([(s - 0.5) / deviation for s in SCORES[:SIZE]] + [0.0] * (len(SCORES) - SIZE))


@pytest.mark.slow  # TRL's GRPOTrainer imports torch, transformers and datasets
@pytest.mark.parametrize("normalize", ["group", "none"])
def test_the_advantages_are_those_of_trl(tmp_path: Path, normalize: str) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    spec = importlib.util.spec_from_file_location("trl_trainer", "examples/trl_trainer.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.make_model(tmp_path / "model")
    seen: list[float] = []

    class Seen(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            out = super()._generate_and_score_completions(inputs)
            seen.extend(out["advantages"].tolist())
            return out

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [[3]] * len(prompts),
            "completion_ids": [[4]] * len(prompts),
            "logprobs": [[-1.0]] * len(prompts),
            "paid": SCORES,
        }

    Seen(
        model=AutoModelForCausalLM.from_pretrained(model),
        reward_funcs=lambda completions, paid, **_: paid,
        args=GRPOConfig(
            output_dir=str(tmp_path / "trl"),
            max_steps=1,
            num_generations=SIZE,
            max_completion_length=1,
            per_device_train_batch_size=len(SCORES),
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            scale_rewards=normalize,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["say"] * GROUPS}),
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_func=rollout,
    ).train()
    # TRL adds 0.0001 to the deviation.
    assert advantages(tmp_path, normalize=normalize) == pytest.approx(seen, rel=3e-4, abs=1e-6)


def test_every_setting_of_training_reaches_the_trainer(tmp_path: Path) -> None:
    """Each key of a run's `training` has its value in `trainer.json`, the run's defaults included."""
    training = {
        "lr": 3e-4,
        "lr_schedule": "linear",
        "warmup": 7,
        "betas": [0.8, 0.9],
        "eps": 1e-6,
        "weight_decay": 0.1,
        "grad_clip": 0.0,
        "algorithm": "cispo",
        "loss": {"kind": "tis", "clip_low": 1.0, "cap": 3.0, "kl": 0.1, "mask_truncated": True},
        "epochs": 2,
        "minibatches": 3,
        "max_tokens_per_microbatch": 99,
        "lora": {"rank": 3},
        "columns": ["ref_logprobs"],
        "domain_balance": "domains",
    }
    keys = set(TrainingSpec.model_fields)
    for given in (training, {}):
        wanted = TrainingSpec.model_validate(given)
        assert trained(tmp_path, training=given).model_dump(include=keys) == wanted.model_dump()


def test_lengths_and_paths_of_an_algorithm_are_those_of_the_run(tmp_path: Path) -> None:
    training = {"algorithm": "dr_grpo", "loss": {"kl": 0.1, "reference": "old/policy"}}
    domain = {"group_size": 2, "max_turns": 3, "max_tokens": 5, "advantage": {"overlong": 0.5}}
    config = trained(tmp_path, training=training, **{f"domains__0__{key}": value for key, value in domain.items()})
    (credit,) = config.domains.values()
    assert config.loss.length == credit.max_length == 15
    assert credit.advantage.overlong == 0.5
    assert config.loss.reference is not None
    assert Path(config.loss.reference).is_absolute()
    assert config.loss.reference.endswith("old/policy")


def test_a_teachers_endpoint_reaches_the_trainer(tmp_path: Path) -> None:
    config = trained(tmp_path, training={"algorithm": "opd", "loss": {"reference": "http://teacher:8000/v1"}})
    assert config.loss.reference == TeacherSpec(url="http://teacher:8000/v1")


@pytest.mark.parametrize(("written", "means"), [("true", "batch"), ("false", "none")])
def test_specs_of_before_keep_their_deviation(written: str, means: str) -> None:
    run = load_run(builtin("runs/quickstart.yaml"), [f"domains.frozen_lake.advantage.normalize={written}"])
    assert run.domain("frozen_lake").advantage.normalize == means


def test_a_groups_deviation_without_its_mean_is_refused() -> None:
    with pytest.raises(SpecError, match=r"normalize 'group' with baseline 'group' alone, not 'domain'"):
        load_run(builtin("runs/quickstart.yaml"), ["domains.frozen_lake.advantage.normalize=group"])

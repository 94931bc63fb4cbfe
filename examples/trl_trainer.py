"""TRL's GRPOTrainer learns from experience that rollart's engine generates, over `rollart service`, on a CPU.

    pip install 'rollart[local,harnesses]'
    python examples/trl_trainer.py [--steps 20]

Three programs that know one another by the service alone: the trainer (TRL, this process) puts prompts and takes whole
groups; a rollout worker (a thread here, any program elsewhere) takes prompts and puts what the engine sampled, with
log-probabilities and reward; the engine loads every version that the trainer announces. Nothing of rollart is changed,
and TRL is given its rollout in the one place that it has for that (`rollout_func`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rollart.service import Experience, Service

WORDS = ["<pad>", "<eos>", "<unk>", "say", "yes", "no", "maybe", "never"]
"""The policy's vocabulary. It is rewarded for "yes"."""

GROUP, PROMPTS, ANSWER = 8, 4, 4
COLUMNS = ["prompt_ids", "completion_ids", "logprobs", "reward"]
TASKS = {"rollout": ["prompt_ids"], "train": COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model(work / "v0")
        url = stack.enter_context(program("rollart.cli.main", "service", "--json"))
        engine = stack.enter_context(
            program("rollart.engine", "--model", str(model), "--port", "0", "--max-context", "64")
        )
        service = Service(json.loads(url)["url"])
        service.init(COLUMNS, TASKS, whole_groups=["train"], capacity=4 * PROMPTS * GROUP, staleness=1)
        stop = threading.Event()
        worker = threading.Thread(target=roll_out, args=(service, engine.removeprefix("ready "), stop))
        worker.start()
        try:
            rewards = train(service, model, work, steps)
        finally:
            stop.set()
            worker.join()
        first, last = rewards[0], rewards[-1]
        print(json.dumps({"steps": len(rewards), "first": first, "last": last, "service": service.status()}))


def train(service: Service, model: Path, work: Path, steps: int) -> list[float]:
    """TRL's own loop; the mean reward of each step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rewards: list[float] = []

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Prompts to the service, whole groups back."""
        unique = [tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts[::GROUP]]
        service.put_prompts([{"prompt_ids": ids} for ids in unique], group_size=GROUP)
        rows = service.get_experience("train", len(unique), timeout_s=60.0)
        if len(rows) != len(prompts):
            raise RuntimeError(f"{len(rows)} of {len(prompts)} answers came within a minute")
        rewards.append(sum(row["reward"] for row in rows) / len(rows))
        return {column: [row[column] for row in rows] for column in COLUMNS}

    def reward(completions: list[str], reward: list[float], **_: Any) -> list[float]:
        """It was paid where it was generated."""
        return reward

    class Publish(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            path = work / f"v{state.global_step}"
            model.save_pretrained(path)
            (path / "COMPLETE").touch()
            service.weight_sync_notify(state.global_step, str(path))

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(work / "trl"),
            max_steps=steps,
            num_generations=GROUP,
            max_completion_length=ANSWER,
            per_device_train_batch_size=PROMPTS * GROUP,
            learning_rate=2e-2,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["say"] * PROMPTS * steps}),
        processing_class=tokenizer,
        rollout_func=rollout,
        callbacks=[Publish()],
    )
    trainer.train()
    return rewards


def roll_out(service: Service, engine: str, stop: threading.Event) -> None:
    """The rollout worker: current weights first, then prompts as they come."""
    loaded = 0
    while not stop.is_set():
        rows = service.get_experience("rollout", PROMPTS * GROUP, at_least=1, timeout_s=0.5)
        version, path = service.weights()
        if rows and version > loaded:
            update(engine, version, path)
            loaded = version
        for row in rows:
            answer(service, engine, row, loaded)


def answer(service: Service, engine: str, row: Experience, version: int) -> None:
    """One row's answer, token for token as it was sampled."""
    sampling = {"max_tokens": ANSWER, "temperature": 1.0, "logprobs": 0}
    body = {"request_id": row.id, "token_ids": row["prompt_ids"], "sampling_params": sampling}
    choice = post(engine, "/inference/v1/generate", body)["choices"][0]
    ids = choice["token_ids"]
    service.put_experience(
        row.id,
        version=version,
        completion_ids=ids,
        logprobs=[c["logprob"] for c in choice["logprobs"]["content"]],
        reward=ids.count(WORDS.index("yes")) / ANSWER,
    )


def update(engine: str, version: int, path: str) -> None:
    """New weights, as vLLM is given them."""
    for route, body in (
        ("/pause?mode=keep", {}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"path": path}}),
        ("/finish_weight_update", {"weight_version": version}),
        ("/resume", {}),
    ):
        post(engine, route, body)


def post(url: str, route: str, body: object) -> Any:
    request = urllib.request.Request(url + route, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as got:
        return json.loads(got.read())


@contextmanager
def program(module: str, *arguments: str) -> Iterator[str]:
    """A process of ours, and the first line that it says."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert started.stdout is not None
        yield started.stdout.readline().strip()
    finally:
        started.terminate()
        started.communicate(timeout=30)


def make_model(directory: Path) -> Path:
    """A Qwen3 of a few thousand parameters with random weights, and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>").save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    (directory / "COMPLETE").touch()
    return directory


if __name__ == "__main__":
    main()

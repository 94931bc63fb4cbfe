"""A trainer of one's own learns inside a run of `rollart launch`: the run's batches over the service, versions back.

    # cluster.yaml: trainer: {external: "127.0.0.1:8200"}
    rollart launch run.yaml --cluster cluster.yaml &
    python examples/outside_trainer.py http://127.0.0.1:8200 --model MODEL_OR_CONFIG_DIR --weights DIR --steps N

On another machine, with `trainer: {external: "0.0.0.0:8200", external_token: "env:ROLLART_TOKEN"}` there and the same
variable here; with --upload if it sees no directory of the run's.

It is REINFORCE with a mean baseline per group, on transformers and torch alone: nothing of rollart but its client.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollart.service import Service, ServiceError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--model", type=Path, required=True, help="directory with config.json, and weights if any")
    parser.add_argument("--weights", type=Path, required=True, help="where versions are written")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--upload", action="store_true", help="send versions over the wire")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    # A controller that is resumed at the same address finds it waiting.
    service = Service(arguments.url, token=os.environ.get("ROLLART_TOKEN", ""), patience_s=600)
    scores: list[float] = []
    version, _ = service.weights()  # -1: the run has none yet; else it went on without us
    model, optimizer = load(current(service, arguments) if version >= 0 else arguments.model, arguments.lr)
    if version < 0:
        version = publish(service, model, arguments, 0, [])
    while version < arguments.steps:
        # The whole batch is one group. Lent under a key: if this program dies, the next one is given it again.
        batch = service.get_experience("train", 1, timeout_s=60, lease_s=600, key=f"after-{version}")
        if not batch:
            continue
        if batch[0]["batch"] != version + 1:  # the run was resumed from another version
            model, optimizer = load(current(service, arguments), arguments.lr)
            version, _ = service.weights()
            if batch[0]["batch"] != version + 1:
                continue
        step(model, optimizer, batch)
        try:
            version = publish(service, model, arguments, version + 1, batch)
        except ServiceError as error:
            if error.status != 409:
                raise
            # It came too late: the run offers the batch, or another one, again.
            model, optimizer = load(current(service, arguments), arguments.lr)
            version, _ = service.weights()
            continue
        service.done(batch)
        scores.append(sum(row["score"] for row in batch) / len(batch))
    print(json.dumps({"steps": len(scores), "scores": scores}))


def load(path: Path, lr: float) -> tuple[Any, Any]:
    if any(path.glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(path)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def current(service: Service, arguments: argparse.Namespace) -> Path:
    """Where the run's version lies, or a copy of it."""
    if not arguments.upload:
        return Path(service.weights()[1])
    service.download_weights(arguments.weights / "run")
    return Path(arguments.weights / "run")


def publish(service: Service, model: Any, arguments: argparse.Namespace, version: int, batch: list[Any]) -> int:
    path = arguments.weights / f"outside-{version}"
    model.save_pretrained(path)
    if arguments.upload:
        service.upload_weights(version, path, batch=batch)
    else:
        service.weight_sync_notify(version, str(path), batch=batch)
    return version


def step(model: Any, optimizer: Any, batch: list[Any]) -> None:
    scores = defaultdict(list)
    for row in batch:
        scores[row["group"]].append(row["score"])
    optimizer.zero_grad()
    for row in batch:
        group = scores[row["group"]]
        ids, mask = torch.tensor(row["token_ids"]), torch.tensor(row["loss_mask"][1:], dtype=torch.float32)
        logits = model(input_ids=ids[None, :-1]).logits[0].float()
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        ratio = (logprobs - torch.tensor(row["logprobs"][1:])).exp().clamp(max=2.0)  # sampled by an older version
        advantage = row["score"] - sum(group) / len(group)
        (-(ratio * mask).sum() * advantage / len(batch)).backward()
    optimizer.step()


if __name__ == "__main__":
    main()

"""Continuous batching: requests join and leave between steps, each step is one forward pass.

A row of a step is a slot with tokens whose KV is missing: one token when it decodes, a suffix when it was just
admitted, all tokens after a weight update. So recomputation under new weights (I5) is the same code as a prefill: the
update sets every slot's KV length to zero, and the next steps recompute the KV.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollart.engine.cache import KvBlock, KvCache
from rollart.engine.decoding import GraphDecoder
from rollart.engine.jobs import EngineJob, FinishedJob, refuse_invalid
from rollart.engine.network import Network, pack_batch
from rollart.engine.sampling import SamplingRows, sample, sample_in_fixed_order, to_device
from rollart.engine.slots import SlotTable
from rollart.errors import EngineError, HandoffFailed
from rollart.lora import Adapter
from rollart.model import Completion, CompletionChunk, EngineStats, FinishReason, VersionSpan

STEP_TOKENS = 2048
"""Maximum new prompt tokens in one step: bounds activations, and the delay of decoding rows by a prefill."""

Ints = npt.NDArray[np.int64]


class Runner:
    """Owns the network, the cache and the slots.

    Synchronous and single-threaded: the caller may add, abort, load and release between steps, never during one.
    Invariant: all KV in the cache was computed under `version`.
    """

    def __init__(
        self,
        network: Network,
        *,
        slots: int,
        context: int,
        version: int = 0,
        stamp: str = "",
        step_tokens: int = STEP_TOKENS,
        deterministic: bool = False,
    ) -> None:
        """`deterministic`: sequences are computed one by one and keep no prefixes, since a product of one row rounds
        differently than one of many: a completion then depends on its request and the weights alone."""
        self.network, self.version, self.stamp, self.context = network, version, stamp, context
        self.loads = 0
        """Number of weight updates: a version number may be loaded again with other content."""
        decodes = network.device.type == "cuda"
        self.cache = KvCache(
            network.architecture,
            slots=slots + decodes,
            context=context,
            device=network.device,
            dtype=network.dtype,
        )
        self.decoder = GraphDecoder(network, self.cache) if decodes else None
        a = network.architecture
        self.table = SlotTable(slots, context, a.experts, whole_prefixes=a.linear is not None)
        self._step_tokens, self._deterministic = step_tokens, deterministic
        self._draw = sample_in_fixed_order if deterministic and network.device.type == "cuda" else sample
        self._waiting: OrderedDict[str, EngineJob] = OrderedDict()
        self._running: dict[str, EngineJob] = {}
        self._by_slot: dict[int, EngineJob] = {}
        self._arrivals = 0
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0
        self.imported_tokens = self.dropped_imports = 0
        self.ended = dict.fromkeys(FinishReason, 0)
        self.prefill_seconds = self.decode_seconds = 0.0
        self.steps = 0

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def stats(self) -> EngineStats:
        # Idle sessions do not count as used: they are evicted on demand.
        used = float(self.table.kv[self.table.active()].sum())
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            cached_tokens=self.cached_tokens,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            kv_used=used / (self.table.slots * self.context),
            kv_tokens=self.table.slots * self.context,
            kv_sessions=self.table.slots,
            external_tokens=self.imported_tokens,
            ended=sum(self.ended.values()),
            steps=self.steps,
        )

    def add(self, job: EngineJob) -> None:
        """Queue a request. EngineError if it can never run here, HandoffFailed if its imported KV is not for it."""
        name = job.request.request_id
        if name in self._waiting or name in self._running:
            raise EngineError(f"request id {name!r} is in use", retryable=False, remedy="give every request its own id")
        refuse_invalid(job, vocab=self.network.architecture.vocab, context=self.context)
        if job.request.adapter is not None or self.network.adapters is not None:
            self._adapter_number(job)
        if job.imported is not None:
            block = job.imported
            self.fence(block.version)
            if block.adapter != job.request.adapter:
                raise HandoffFailed("KV import refused: it was computed with another adapter", remedy="prefill again")
            if not self.cache.fits(block):
                raise HandoffFailed(
                    f"KV import refused: its shape {tuple(block.keys.shape)} {block.keys.dtype} is not this model's",
                    remedy="pair engines of one model and one --dtype",
                )
            # KV returned to a prefill engine may diverge from the next prompt (an agent that drops its reasoning); the
            # common prefix is valid.
            if not job.export and _common(block, job) < min(len(block.token_ids), len(job.prompt)):
                raise HandoffFailed("KV import refused: it belongs to another prompt")
        self._waiting[name] = job

    def abort(self, request_ids: Sequence[str] | None = None) -> list[FinishedJob]:
        """End these requests (all if None) with their tokens so far. Unknown ids are ignored."""
        ended_jobs = []
        for name in [*self._waiting, *self._running] if request_ids is None else request_ids:
            job = self._waiting.pop(name, None) or self._running.get(name)
            if job is not None:
                ended_jobs.append(self._finish(job, FinishReason.ABORT))
        return ended_jobs

    def release(self, session: str) -> bool:
        """Free a session's idle prefix; False if it holds none."""
        return self.table.release(session)

    def held(self, job: EngineJob) -> int:
        """Number of prompt tokens whose KV the request's session holds here; never includes the last token."""
        return self.table.cached(job.request.session, _salt(job), job.prompt)

    def session_kv(self, session: str, token_ids: tuple[int, ...], version: int, start: int) -> KvBlock | None:
        """A copy of a session's KV of these tokens from `start` on, without states. None if the session does not hold
        all of them, or the weights are no longer of that version."""
        tokens = np.array(token_ids, np.int64)
        slot = self.table.holder(session, tokens)
        if slot is None:
            running = (job for job in self._running.values() if job.request.session == session)
            slot = next((job.slot for job in running if self.table.holds(job.slot, tokens)), None)
        if slot is None or version != self.version:
            return None
        return self._copied(slot, token_ids, start)

    def fence(self, version: int) -> None:
        """Refuse KV of other weights: it would be silently wrong, and labelled with this engine's version."""
        if version != self.version:
            raise HandoffFailed(
                f"KV import refused: it was computed under weights {version}, this engine has {self.version}",
                remedy="prefill again, or decode on an engine of the same version",
            )

    def reset_prefix_cache(self, *, running: bool = False) -> bool:
        """Drop idle prefixes. `running` also recomputes the KV of active requests; without it, returns False if there
        are any."""
        self.table.drop_idle()
        if running:
            self.table.kv[:] = 0
        return running or not self._running

    def load(
        self,
        tensors: Mapping[str, Tensor],
        version: int,
        stamp: str = "",
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        """Replace the weights (`Network.load`): idle prefixes are dropped, and the next steps recompute the KV of
        active requests. UsageError, with nothing changed, if the tensors are of another architecture."""
        self.network.load(tensors, adapters)
        self.version, self.stamp = version, stamp
        self.loads += 1
        self.reset_prefix_cache(running=True)
        for job in self._waiting.values():
            self.dropped_imports += job.imported is not None
            job.imported = None
        for job in self._running.values():
            job.logits = None
            # Nothing was drawn with the choices so far; with those of an answer's beginning there was.
            if (experts := self.table.experts) is not None and self.table.known[job.slot] == len(job.prompt):
                experts.kept[job.slot] = 0

    @torch.inference_mode()
    def step(self) -> list[FinishedJob]:
        """Admit requests that fit, compute one forward pass, sample. Returns the requests that ended."""
        ended_jobs: list[FinishedJob] = []
        if complete := self._admit():
            # Their first token is drawn from the logits that came with the KV. They are exactly the prefill engine's; a
            # pass over the last token alone would only approximate them, since a product of one row rounds differently
            # than one of many.
            rows = [job.logits for job in complete if job.logits is not None]
            logits = torch.stack(rows).to(self.network.device, torch.float32)
            slots = np.array([job.slot for job in complete], np.int64)
            together = 1 if self._deterministic else len(complete)
            for at in range(0, len(complete), together):
                ended_jobs += self._sample(logits[at : at + together], slots[at : at + together])
        slots = self._select_slots()
        for part in slots[:, None] if self._deterministic else [slots]:
            if len(part):
                ended_jobs += self._advance(part)
        return ended_jobs

    def _advance(self, slots: Ints) -> list[FinishedJob]:
        """One forward pass over these slots, and sampling. Returns the requests that ended."""
        began, table = time.perf_counter(), self.table
        start = table.kv[slots]
        end = np.minimum(table.known[slots], start + self._step_tokens)
        logits, order = self._logits(slots, start, end)
        table.kv[slots] = end
        slots = slots if order is None else slots[order]
        whole = table.kv[slots] == table.known[slots]
        if not whole.all():  # a chunk of a long prompt: nothing to sample yet
            logits, slots = logits.index_select(0, to_device(np.flatnonzero(whole), logits.device)), slots[whole]
        ended_jobs = self._sample(logits, slots) if len(slots) else []
        new = end - start
        # The step's time is split between prefill and decode by tokens: they share one forward pass.
        seconds, decoded, total = time.perf_counter() - began, int((new == 1).sum()), int(new.sum())
        self.steps += 1
        self.decode_seconds += seconds * decoded / total
        self.prefill_seconds += seconds * (total - decoded) / total
        return ended_jobs

    def _logits(self, slots: Ints, start: Ints, end: Ints) -> tuple[Tensor, Ints | None]:
        """As `_forward`; the order None means that of `slots`. On a GPU, decoding rows use the graph even beside
        prefills: attention over gathered copies of their KV would cost more than reading the weights twice."""
        if self.decoder is None:
            return self._forward(slots, start, end)
        decoding = end - start == 1
        if not decoding.any():
            return self._forward(slots, start, end)
        rows, at = slots[decoding], start[decoding]
        chosen = self._chosen()
        adapters = None if self.network.adapters is None else self.table.adapter[rows]
        decoded = self.decoder.step(self.table.tokens[rows, at], at, rows, chosen, adapters)
        self._record(rows, at, at + 1, chosen)
        if decoding.all():
            return decoded, None
        logits, order = self._forward(slots[~decoding], start[~decoding], end[~decoding])
        return torch.cat((decoded, logits)), np.concatenate(
            (np.flatnonzero(decoding), np.flatnonzero(~decoding)[order])
        )

    def _forward(self, slots: Ints, start: Ints, end: Ints) -> tuple[Tensor, Ints]:
        """Compute the tokens [start, end) of each slot; returns logits after each slot's last token, and the order of
        the slots in them."""
        adapters = None if self.network.adapters is None else self.table.adapter
        batch = pack_batch(self.network, self.table.tokens, slots, start, end, context=self.context, adapters=adapters)
        chosen = self._chosen()
        logits = self.network.forward(batch, self.cache, chosen)
        self._record(slots[batch.order], start[batch.order], end[batch.order], chosen)
        return logits, batch.order

    def _chosen(self) -> list[Tensor] | None:
        """For the experts of a forward pass; None for a model without."""
        return None if self.table.experts is None else []

    def _record(self, slots: Ints, start: Ints, end: Ints, chosen: list[Tensor] | None) -> None:
        if chosen is not None and self.table.experts is not None:
            self.table.experts.record(slots, start, end, [numbers.cpu().numpy() for numbers in chosen])

    def _admit(self) -> list[EngineJob]:
        """Give waiting requests slots, first come first served. Returns those whose next token can be sampled without
        a forward pass."""
        complete = []
        while self._waiting:
            name, job = next(iter(self._waiting.items()))
            claim = self.table.acquire(self._session(job), _salt(job), job.prompt)
            if claim is None:
                break
            del self._waiting[name]
            self._running[name] = job
            job.slot, job.cached = claim
            if self.network.adapters is not None:
                self.table.adapter[job.slot] = self._adapter_number(job)
            self._by_slot[job.slot] = job
            if job.imported is not None and self._import(job, job.imported):
                complete.append(job)
            self.cached_tokens += job.cached
            self.prompt_tokens += len(job.prompt)
            self._arrivals += 1
            s = job.request.sampling
            eos = () if job.ignore_eos else self.network.architecture.eos
            self.table.limits(
                job.slot,
                limit=min(len(job.prompt) + s.max_tokens, self.context),
                temperature=s.temperature,
                top_p=s.top_p,
                seed=secrets.randbits(64) if s.seed is None else s.seed,
                stops=(*s.stop_token_ids, *eos),
                arrival=self._arrivals,
            )
        return complete

    def _adapter_number(self, job: EngineJob) -> int:
        """The number of the request's adapter. EngineError for one that the engine lacks."""
        stack, name = self.network.adapters, job.request.adapter
        if stack is None or name not in stack.names:
            there = "no adapters" if stack is None else f"the adapters {', '.join(stack.names)}"
            wrong = "the request names no adapter" if name is None else f"there is no adapter {name!r}"
            remedy = "leave out the model" if stack is None else "name one of them as the request's model"
            raise EngineError(f"{wrong}: the engine has {there}", retryable=False, remedy=remedy)
        return stack.names.index(name)

    def _session(self, job: EngineJob) -> str:
        """Under which a prefix is kept; '': none is."""
        return "" if self._deterministic else job.request.session

    def _import(self, job: EngineJob, block: KvBlock) -> bool:
        """Extend a claimed slot's prefix with another engine's KV, if the KV is contiguous with the prefix and reaches
        further; otherwise the tokens are computed here. True if no prompt token is left to compute."""
        job.imported = None
        reach = min(_common(block, job), len(job.prompt))
        whole = reach == len(job.prompt) == len(block.token_ids) and block.logits is not None
        if not whole:
            reach = min(reach, len(job.prompt) - 1)
        if reach <= job.cached:
            return False
        # The session was evicted during the transfer, or the prompt leaves the block's sequence before its states.
        if block.start > job.cached or (block.states is not None and reach < len(block.token_ids)):
            self.dropped_imports += 1
            return False
        self.cache.load(job.slot, block, job.cached, reach)
        if (experts := self.table.experts) is not None:
            came = None if block.experts is None else block.experts[job.cached - block.start : reach - block.start]
            experts.put(job.slot, job.cached, reach, None if came is None else came.numpy())
        self.imported_tokens += reach - job.cached
        self.table.kv[job.slot] = job.cached = reach
        job.logits = block.logits if whole else None
        return whole

    def piece(self, job: EngineJob) -> CompletionChunk | None:
        """The tokens of a running request since the last call, which is at most one step ago; None if there are
        none."""
        begin, known = len(job.prompt) + job.shown, 0 if job.slot < 0 else int(self.table.known[job.slot])
        if known <= begin:
            return None
        job.shown += known - begin
        at = (job.slot, slice(begin, known))
        return CompletionChunk(
            tuple(self.table.tokens[at].tolist()), tuple(self.table.logprobs[at].tolist()), self.version, self.stamp
        )

    def _select_slots(self) -> Ints:
        """The slots of this step: all decoding ones, and prefills in order of arrival up to the token budget."""
        table = self.table
        slots = table.active()
        suffix = table.known[slots] - table.kv[slots]
        prefilling = slots[suffix > 1]
        if not len(prefilling) or int(suffix.sum()) <= self._step_tokens:
            return slots
        prefilling = prefilling[np.argsort(table.arrival[prefilling])]
        cumulative = np.cumsum(table.known[prefilling] - table.kv[prefilling])
        fits = max(1, int(np.searchsorted(cumulative, self._step_tokens, side="right")))
        return np.concatenate((slots[suffix == 1], prefilling[:fits]))

    def _sample(self, logits: Tensor, slots: Ints) -> list[FinishedJob]:
        """Draw one token for each row of the logits and end the requests that are complete."""
        table = self.table
        jobs = [self._by_slot[slot] for slot in slots.tolist()]
        allowed = [job.allowed for job in jobs]
        at = table.known[slots]
        rows = SamplingRows(
            temperature=table.temperature[slots],
            top_p=table.top_p[slots],
            seed=table.seed[slots],
            index=at - table.prompt[slots],
            allowed=allowed if any(a is not None for a in allowed) else None,
        )
        for row, job in enumerate(jobs):
            if job.export and rows.index[row] == 0:
                job.logits = logits[row].to("cpu", copy=True)
        ids, logprobs = self._draw(logits, rows)
        table.tokens[slots, at] = ids
        table.logprobs[slots, at] = logprobs
        table.known[slots] = at + 1
        self.generated_tokens += len(slots)
        for row in np.flatnonzero(table.loads[slots] != self.loads).tolist():
            jobs[row].spans.append((self.version, int(rows.index[row]), self.stamp))
        table.loads[slots] = self.loads
        stopped = (table.stops[slots] == ids[:, None]).any(1)
        ended = stopped | (at + 1 >= table.limit[slots])
        return [
            self._finish(jobs[row], FinishReason.STOP if stopped[row] else FinishReason.LENGTH)
            for row in np.flatnonzero(ended).tolist()
        ]

    def _finish(self, job: EngineJob, reason: FinishReason) -> FinishedJob:
        """Remove a job, keep its session's prefix, and build its completion."""
        self.ended[reason] += 1
        if job.slot < 0:
            return FinishedJob(job, Completion((), (), (), reason, prompt_tokens=len(job.prompt)))
        table, slot, prompt = self.table, job.slot, len(job.prompt)
        known = int(table.known[slot])
        ends = [*(start for _, start, _ in job.spans), known - prompt][1:]
        spans = tuple(
            VersionSpan(version, start, end, stamp)
            for (version, start, stamp), end in zip(job.spans, ends, strict=True)
        )
        completion = Completion(
            token_ids=tuple(table.tokens[slot, prompt:known].tolist()),
            logprobs=tuple(table.logprobs[slot, prompt:known].tolist()),
            spans=spans,
            finish=reason,
            prompt_tokens=prompt,
            cached_tokens=job.cached,
            experts=self._experts(job, known - 1),
        )
        # A prefill engine that misses returned KV would compute it with other roundings.
        wanted = job.export or (job.returns and not self._deterministic)
        kv = self._export(job) if wanted and reason is not FinishReason.ABORT else None
        del self._running[job.request.request_id]
        del self._by_slot[slot]
        table.retire(slot, "" if job.ends else self._session(job), _salt(job))
        return FinishedJob(job, completion, kv)

    def _export(self, job: EngineJob) -> KvBlock | None:
        """The KV that a finished request leaves for its peer, without the tokens that the peer already holds. Those
        can still be requested from the session; a request without a session therefore exports everything. None if the
        states of linear attention are past the prompt whose KV was asked for."""
        kv = int(self.table.kv[job.slot])
        n = len(job.prompt) if job.export else kv
        states = self.cache.export_states(job.slot)
        if states is not None and n != kv:
            return None
        start = min(job.peer_holds, n) if job.request.session and not job.ends else 0
        tokens = tuple(self.table.tokens[job.slot, :n].tolist())
        block = dataclasses.replace(self._copied(job.slot, tokens, start), states=states)
        return dataclasses.replace(block, logits=job.logits) if job.export else block

    def _copied(self, slot: int, token_ids: tuple[int, ...], start: int) -> KvBlock:
        """A copy of a slot's KV of these tokens from `start` on, with the experts that they ran through."""
        block = self.cache.export(slot, token_ids, self.version, start=start)
        if (stack := self.network.adapters) is not None:
            block = dataclasses.replace(block, adapter=stack.names[self.table.adapter[slot]])
        if (experts := self.table.experts) is None:
            return block
        copy = experts.ids[slot, start : len(token_ids)].copy()
        return dataclasses.replace(block, experts=torch.from_numpy(copy))

    def _experts(self, job: EngineJob, end: int) -> tuple[bytes, ...]:
        """The experts that the request asks for, of tokens before `end`."""
        begin, experts = job.request.experts_from, self.table.experts
        return () if begin is None or experts is None else experts.read(job.slot, begin, end)


def _salt(job: EngineJob) -> str | None:
    """KV is reused under an equal salt alone: the request's, with its adapter, if it has one."""
    request = job.request
    return request.cache_salt if request.adapter is None else f"{request.adapter}/{request.cache_salt}"


def _common(block: KvBlock, job: EngineJob) -> int:
    """Length of the common prefix of a block's sequence and a prompt, in tokens."""
    n = min(len(block.token_ids), len(job.prompt))
    differs = np.flatnonzero(np.array(block.token_ids[:n], np.int64) != job.prompt[:n])
    return int(differs[0]) if len(differs) else n

"""The runner of the Torch backend: runs step plans on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from sglang_jax.architectures.pooling import Pooling
from sglang_jax.errors import ConfigError, ParameterError
from sglang_jax.runner.draft_model import DraftLag
from sglang_jax.runner.drafts import REJECTED, FlatPlan, flatten_drafts, pack_hints, pack_texts, restore_rows
from sglang_jax.runner.expert_load import ExpertLoad, load_since
from sglang_jax.runner.packing import DRAFT_NUMBER
from sglang_jax.runner.page_tables import TableLayout, side_by_side
from sglang_jax.runner.plan import (
    INVALID_TOKEN,
    LOGPROB_BUCKETS,
    NO_LOGPROBS,
    PageDeltas,
    PromptLogprobs,
    RunnerSpec,
    SamplingUpdate,
    StepPlan,
    StepResult,
    TokenMasks,
    TopLogprobs,
    check_plan,
    one_each,
)
from sglang_jax.runner.protocol import RunnerReport, cannot_reload
from sglang_jax.runner.pulse import Building
from sglang_jax.runner.row_updates import count_history, pack_row_updates
from torch_backend import host_memory
from torch_backend.batch import ForwardBatch
from torch_backend.devices import device_name
from torch_backend.draft_model import Drafter, DraftRequest, WithDraft
from torch_backend.drafts import DraftedTokens, DraftSequences, KnownTokens, StateMoves, kept_samples
from torch_backend.graphs import Bucket, Capture, StepGraphs
from torch_backend.layers.pooler import sum_of
from torch_backend.logprobs import Logprobs, prompt_logprobs, token_logprobs
from torch_backend.native_sampler import NativeSampler
from torch_backend.packing import StepInputs, StepLayout
from torch_backend.profile import Profile
from torch_backend.sampler import MaskedLines, TokenSampler, sample
from torch_backend.sampling_state import Needs, RowNeeds, SamplingState
from torch_backend.step import Model, RowTensors, build_batch, own_slots, settle_drafts
from torch_backend.streams import CpuThread, Pending, Stream, integers_to_device, others_keep_threads

_SHORT_PROMPT = 16


@dataclass(frozen=True, slots=True)
class DeviceOutputs:
    """Results of a step in host memory: tokens int32 and logprobs of the sequences that sample, and the logprobs of
    each of the plan's requests for prompt logprobs. `pooled`, float32 or float64, and `replayed`: see `StepResult`."""

    tokens: torch.Tensor | None
    logprobs: Logprobs | None
    prompt_logprobs: tuple[Logprobs, ...]
    pooled: tuple[torch.Tensor, ...]
    replayed: bool


@dataclass(slots=True)
class _Forwarded:
    """The state between the two parts of a step: its inputs and the logits of the sequences that sample, on the device,
    and logprobs and vectors of prompts, already copied to the host. `replayed`: see `StepResult`."""

    inputs: StepInputs
    logits: torch.Tensor | None
    prompt_logprobs: tuple[Logprobs, ...]
    pooled: tuple[torch.Tensor, ...]
    replayed: bool


@dataclass(slots=True)
class TorchStep:
    """A submitted step. `pending`: its results, set once all of it is submitted; `second`: submits the second part,
    None if there is none left to submit; `max_samples`: the runner's."""

    flat: FlatPlan
    max_samples: int
    pending: Pending[DeviceOutputs] | None
    second: Callable[[TokenMasks], Pending[DeviceOutputs]] | None = None

    def sample(self, masks: TokenMasks) -> None:
        """See `StepHandle`. Raises `RuntimeError` for a step that does not wait for masks."""
        if self.second is None:
            raise RuntimeError(f"step {self.flat.plan.step} waits for no masks")
        self.pending, self.second = self.second(masks), None

    def result(self) -> StepResult:
        """Blocks until the step has run. Raises the device's error."""
        plan = self.flat.plan
        assert self.pending is not None, f"step {plan.step} waits for its masks"
        outputs = self.pending.wait()
        tokens = np.full(len(plan.rows), INVALID_TOKEN, np.int32)
        if outputs.tokens is not None:
            tokens[plan.samples] = outputs.tokens.numpy()
        logprobs = None
        if plan.top_logprobs != NO_LOGPROBS:
            logprobs = _of_all_sequences(outputs.logprobs, plan)
        of_prompts = tuple(_on_host(found) for found in outputs.prompt_logprobs)
        pooled = tuple(part.double().numpy() for part in outputs.pooled)
        found = StepResult(*one_each(tokens, plan.samples), logprobs, of_prompts, pooled, outputs.replayed)
        return restore_rows(self.flat, found, self.max_samples)


def _on_host(found: Logprobs) -> TopLogprobs:
    return TopLogprobs(found.logprobs.numpy(), found.top_ids.numpy(), found.top_logprobs.numpy())


def _of_all_sequences(found: Logprobs | None, plan: StepPlan) -> TopLogprobs:
    """Logprobs of all sequences; zeros for those that sampled no token."""
    sequences = len(plan.rows)
    logprobs = np.zeros(sequences, np.float32)
    if found is None:
        return TopLogprobs(logprobs, np.zeros((sequences, 0), np.int32), np.zeros((sequences, 0), np.float32))
    top_ids = np.zeros((sequences, found.top_ids.shape[1]), np.int32)
    top_logprobs = np.zeros(top_ids.shape, np.float32)
    for target, values in ((logprobs, found.logprobs), (top_ids, found.top_ids), (top_logprobs, found.top_logprobs)):
        target[plan.samples] = values.numpy()
    return TopLogprobs(logprobs, top_ids, top_logprobs)


class _Closed:
    """Replaces the model of a closed runner."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        raise RuntimeError("the runner is closed")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the runner is closed")


@dataclass(frozen=True, slots=True)
class ReleasableMemory:
    """What a runner needs to give back memory, and to load other weights. `reload`: returns a model over the same pages
    with the weights of a path, or with its own again (None); `without_weights`: returns it without weights; `pages`:
    keys, values and states of all models. Both raise `ConfigError` if that is not possible."""

    reload: Callable[[Model, str | None], Model]
    without_weights: Callable[[Model], Model]
    pages: tuple[torch.Tensor, ...]


class TorchRunner:
    """`Runner` on one device, or one rank of several that run the same plans.

    A launch notes on the host which work the step's rows need and submits the step to the stream, which runs steps in
    order. Sampled tokens stay on the device, by row, where the next step reads them.

    The runner owns `model` and its KV pages; `stream` and `sampler` default to the CPU's; `graph_buckets`,
    `mixed_buckets`: row counts of the decode steps, and sizes of the steps with prompts, to capture with `capture`
    (None: every step is eager); `draft`: the draft model with its KV pages, whose pools are those of the spec with
    `draft`; `memory`: None for models of tests; `states`: the model's state pools,
    whose slots after those of the spec's pool hold the states after drafts; `counted`: by layer number, int64
    `[experts]`, in which the model counts the tokens routed to each expert.
    """

    def __init__(
        self,
        model: Model,
        spec: RunnerSpec,
        *,
        device: torch.device,
        stream: Stream | None = None,
        sampler: TokenSampler | None = None,
        capture: Capture | None = None,
        graph_buckets: tuple[int, ...] = (),
        mixed_buckets: tuple[Bucket, ...] = (),
        memory: ReleasableMemory | None = None,
        weight_bytes: int = 0,
        kv_bytes: int = 0,
        details: Mapping[str, str] | None = None,
        draft: Model | None = None,
        states: Sequence[torch.Tensor] = (),
        counted: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self._spec = spec
        self._table = TableLayout.of(spec)
        self._memory = memory
        self._sizes: dict[torch.Tensor, int] = {}
        self._main, self._draft = model, draft
        self._path: str | None = None
        self._has_weights = True
        self._model = self._with_draft(model)
        self._device = device
        self._device_name = device_name(device)  # here, because threads of torch are counted for each thread
        self._stream = stream or CpuThread()
        self._sampler = sampler or NativeSampler()
        self._page_size = spec.pools[0].page_size
        self._states = tuple(states)
        rows = spec.max_rows + 1
        self._dump_row = spec.max_rows
        self._drafts = spec.max_samples > 1
        known = KnownTokens.zeros(rows, spec.max_context, device) if self._drafts else None
        drafted = None if draft is None else DraftedTokens.zeros(rows, spec.max_samples - 1, device)
        self._rows = RowTensors.zeros(rows, spec.table_columns, device, known, drafted)
        self._lag = DraftLag(spec.max_rows)
        self._drafter = None
        if draft is not None:
            to_device = partial(integers_to_device, self._stream)
            windows = tuple(pool.window for pool in spec.pools if pool.draft)
            self._drafter = Drafter(draft, windows, self._rows, self._table, self._page_size, to_device)
        self._sampling = SamplingState.empty(rows, spec.vocab_size, device)
        self._needs = RowNeeds(rows)
        self._graphs: StepGraphs | None = None
        if capture is not None and graph_buckets:
            self._graphs = StepGraphs(
                graph_buckets,
                capture,
                self._forward,
                self._stream,
                self._dump_row,
                device,
                self._table,
                self._drafts,
                mixed_buckets,
                self._page_size,
            )
        self._warm_graphs = 0
        self._counted = dict(counted or {})
        self._load_in_warm_up: tuple[ExpertLoad, ...] = ()
        self._waiting: TorchStep | None = None
        self._profile: Profile | None = None
        self._weight_bytes = weight_bytes
        self._kv_bytes = kv_bytes
        self._details = dict(details or {})
        self._stream.settle()

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def warm_up(self, progress: Callable[[int, int, str], None], *, first_only: bool = False) -> None:
        """Runs a step of each kind on padding, which compiles kernels, and captures steps; `first_only` is ignored."""
        longest = min(self._spec.token_budget, self._spec.max_context)
        decode = StepLayout.decode(self._spec.max_rows, 0, drafts=self._drafts, states=self._table.states)
        # Kernels may split the keys of a short prompt over the chip.
        prefill = [
            StepLayout(1, 1, 0, tokens, 0, drafts=self._drafts, states=self._table.states)
            for tokens in dict.fromkeys((longest, min(longest, _SHORT_PROMPT)))
        ]
        kinds = {"a decode step": [decode], "a prefill step": prefill}
        if self._spec.pooling is not None:
            del kinds["a decode step"]
        graphs = self._graphs
        drafter = self._drafter
        if drafter is not None:
            warm_up = partial(drafter.warm_up, self._dump_row, partial(self._sample_drafts, Needs.everything()))
            self._stream.submit(warm_up).wait()
        total = len(kinds) + (0 if graphs is None else len(graphs.layouts))
        for done, (what, layouts) in enumerate(kinds.items(), 1):
            for layout in layouts:
                self._stream.submit(partial(self._run_padding, layout)).wait()
            progress(done, total, what)
        if graphs is not None:
            captured = partial(graphs.capture_all, lambda done, what: progress(len(kinds) + done, total, what))
            self._stream.submit(captured).wait()
            self._warm_graphs = len(graphs)
        self._load_in_warm_up = self._expert_load()

    def announce_builds(self, building: Building) -> None:
        """See `Runner`. Not announced: Torch compiles single kernels at first use, in seconds."""

    def launch(self, plan: StepPlan) -> TorchStep:
        """Starts a step and returns without waiting for it. Raises `ValueError` for a plan beyond the spec; nothing has
        changed then."""
        check_plan(plan, self._spec, states=self._table.states)
        flat = flatten_drafts(plan)
        plan = flat.plan
        if plan.num_tokens > self._spec.token_budget or len(plan.rows) > self._spec.max_rows:
            raise ValueError(
                f"a step of {plan.num_tokens} tokens in {len(plan.rows)} rows is beyond the runner's "
                f"{self._spec.token_budget} tokens and {self._spec.max_rows} rows"
            )
        if self._waiting is not None and self._waiting.second is not None:
            raise RuntimeError(
                f"step {plan.step} was launched while step {self._waiting.flat.plan.step} waits for its masks"
            )
        wanted = None
        if self._drafter is not None:
            wanted = DraftRequest.of(flat, *self._lag.missed(flat))
            self._lag.launched(flat)
        self._needs.replace(plan.row_updates.sampling)
        needs = self._needs.of_step(plan, self._spec.max_samples)
        if plan.masked is None:
            pending = self._stream.submit(partial(self._run, flat, needs, wanted))
            return TorchStep(flat, self._spec.max_samples, pending)
        forwarded = self._stream.submit(partial(self._forward_part, flat, needs, wanted))

        def second(masks: TokenMasks) -> Pending[DeviceOutputs]:
            return self._stream.submit(lambda: self._sample_part(flat, forwarded.submitted(), needs, masks))

        self._waiting = TorchStep(flat, self._spec.max_samples, None, second)
        return self._waiting

    def _with_draft(self, model: Model) -> Model:
        return model if self._draft is None else WithDraft(model, self._draft, self._table.draft)

    def load_weights(self, model_path: str) -> None:
        """See `Runner`. All of it runs on the stream, after the steps in flight."""
        self._load(model_path)
        self._path = self._details["weights_path"] = model_path

    def _load(self, model_path: str | None) -> None:
        memory = self._memory
        if memory is None:
            cannot_reload(model_path)
        with others_keep_threads():
            self._main = self._stream.submit(lambda: memory.reload(self._main, model_path)).wait()
        self._has_weights = True
        self._model = self._with_draft(self._main)

    def release_memory(self, *, weights: bool, kv: bool) -> None:
        """See `Runner`. Captured steps contain addresses of this memory, so an engine with any refuses."""
        memory = self._memory
        if memory is None:
            cannot_reload(None)
        if self._graphs is not None:
            raise ConfigError("memory cannot be released with captured steps; restart with --disable-cuda-graph")
        if weights:
            self._main = memory.without_weights(self._main)
            self._has_weights = False
            self._model = self._with_draft(self._main)
        if kv:
            self._stream.submit(lambda: self._resize(memory.pages, empty=True)).wait()

    def resume_memory(self, *, weights: bool, kv: bool) -> None:
        if weights:
            self._load(self._path)
        if kv and self._memory is not None:
            pages = self._memory.pages
            self._stream.submit(lambda: self._resize(pages, empty=False)).wait()

    def _resize(self, pages: Sequence[torch.Tensor], *, empty: bool) -> None:
        """Frees the storage of pages, which stay the same tensors, or allocates it again, zeroed."""
        for page in pages:
            storage = page.untyped_storage()
            if empty:
                self._sizes[page] = storage.nbytes()
                storage.resize_(0)
            else:
                storage.resize_(self._sizes.pop(page))
                host_memory.ask(page)
                page.zero_()
        if empty and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def start_profile(self, folder: str) -> None:
        if "://" in folder:
            raise ParameterError(f"profiles of the torch backend are written to a local folder, got {folder}")
        self._profile = self._stream.submit(lambda: Profile.start(Path(folder), self._device)).wait()

    def stop_profile(self) -> None:
        assert self._profile is not None, "no profile is being recorded"
        profile, self._profile = self._profile, None
        self._stream.submit(profile.stop).wait()

    def report(self) -> RunnerReport:
        graphs = 0 if self._graphs is None else len(self._graphs)
        return RunnerReport(
            backend="torch",
            device=self._device_name,
            compiled_programs=graphs,
            compiles_after_warm_up=graphs - self._warm_graphs,
            weight_bytes=self._weight_bytes if self._has_weights else 0,
            kv_bytes=0 if self._sizes else self._kv_bytes,
            details=self._details,
        )

    def expert_load(self) -> tuple[ExpertLoad, ...]:
        return load_since(self._load_in_warm_up, self._expert_load())

    def _expert_load(self) -> tuple[ExpertLoad, ...]:
        if not self._counted:
            return ()
        counts = list(self._counted.values())
        # Concatenated for one copy, which later steps do not change.
        found = self._stream.submit(lambda: self._stream.to_host(torch.cat(counts))).wait()
        parts = torch.split(found, [len(count) for count in counts])
        return tuple(ExpertLoad(layer, part.numpy()) for layer, part in zip(self._counted, parts, strict=True))

    def close(self) -> None:
        """Waits for steps in flight, and releases the model and its captured steps."""
        self._stream.close()
        self._model, self._graphs, self._warm_graphs, self._drafter = _Closed(), None, 0, None
        self._main, self._draft, self._memory = _Closed(), None, None

    def _run(self, flat: FlatPlan, needs: Needs, wanted: DraftRequest | None) -> DeviceOutputs:
        return self._sample_part(flat, self._forward_part(flat, needs, wanted), needs, None)

    def _forward_part(self, flat: FlatPlan, needs: Needs, wanted: DraftRequest | None) -> _Forwarded:
        """Runs a step up to its logits, on the stream. `wanted`: the drafts that the draft model computes."""
        plan = flat.plan
        if plan.row_updates.sampling:
            self._replace_rows(plan.row_updates.sampling)
        if plan.row_updates.texts and self._rows.known is not None:
            texts = plan.row_updates.texts
            packed = pack_texts(texts, len(texts), self._dump_row, max(len(text.tokens) for text in texts))
            self._rows.known.replace(integers_to_device(self._stream, packed))
        if plan.row_updates.hints and self._rows.known is not None:
            hints = plan.row_updates.hints
            self._rows.known.hint(integers_to_device(self._stream, pack_hints(hints, len(hints), self._dump_row)))
        deltas = side_by_side(plan.page_deltas, self._table.starts)
        if self._drafter is not None and wanted is not None:
            self._apply_deltas(deltas)
            deltas = deltas[:0]
            self._drafter.propose(wanted, partial(self._sample_drafts, needs))
        bucket = None if self._graphs is None else self._graphs.bucket(plan)
        inputs, hidden = self._hidden(flat, deltas, bucket)
        logits = self._logits(plan, inputs, hidden) if plan.samples.any() else None
        found = tuple(self._prompt_logprobs(plan, inputs, wanted, hidden) for wanted in plan.prompt_logprobs)
        found_on_host = tuple(self._logprobs_to_host(part) for part in found)
        pooled = tuple(self._stream.to_host(part) for part in self._pooled(plan, inputs, hidden))
        return _Forwarded(inputs, logits, found_on_host, pooled, bucket is not None)

    def _sample_part(
        self, flat: FlatPlan, forwarded: _Forwarded, needs: Needs, masks: TokenMasks | None
    ) -> DeviceOutputs:
        """Runs the rest of a step, on the stream: sampling and copies to the host."""
        tokens, logprobs = None, None
        if forwarded.logits is not None:
            tokens, logprobs = self._sample(flat.plan, forwarded.inputs, forwarded.logits, needs, masks)
            if self._states:
                self._settle_states(flat, forwarded.inputs, tokens)
        return DeviceOutputs(
            None if tokens is None else self._stream.to_host(tokens),
            None if logprobs is None else self._logprobs_to_host(logprobs),
            forwarded.prompt_logprobs,
            forwarded.pooled,
            forwarded.replayed,
        )

    def _settle_states(self, flat: FlatPlan, inputs: StepInputs, reported: torch.Tensor) -> None:
        """Keeps the state after the last accepted draft of each row. `reported`: tokens for the host, one per
        sequence."""
        moves = StateMoves.of(flat, partial(integers_to_device, self._stream))
        if moves is None:
            return
        slots = self._rows.page_table[inputs.rows.long(), self._table.slots]
        sources, targets = moves.slots(own_slots(inputs, slots, self._table.first_draft_slot), reported)
        for pool in self._states:
            pool.index_copy_(0, targets, pool[sources])

    def _sample_drafts(
        self, needs: Needs, logits: torch.Tensor, rows: torch.Tensor, kv_lens: torch.Tensor
    ) -> torch.Tensor:
        return sample(logits, self._sampling, rows, kv_lens, needs, self._sampler)

    def _hidden(self, flat: FlatPlan, deltas: PageDeltas, bucket: Bucket | None) -> tuple[StepInputs, torch.Tensor]:
        """Returns the step's inputs on the device, and hidden states of its tokens. `bucket`: the captured step to
        replay, None for none."""
        plan, draft_numbers = flat.plan, flat.draft_numbers
        if self._graphs is not None and bucket is not None:
            if len(deltas.rows) > self._graphs.layouts[bucket].deltas:
                self._apply_deltas(deltas)
                deltas = deltas[:0]
            settle = partial(self._settle_drafts, flat) if self._drafts else None
            return self._graphs.run(bucket, plan, deltas, draft_numbers, settle)
        layout = StepLayout.exact(plan, deltas, drafts=self._drafts, states=self._table.states)
        host = self._stream.host_buffer(layout.size)
        layout.pack(plan, deltas, self._dump_row, host.numpy(), draft_numbers)
        inputs = layout.unpack(self._stream.to_device(host))
        if self._drafts:
            self._settle_drafts(flat, inputs)
        hidden = self._forward(inputs)
        if self._rows.drafted is not None and layout.tokens:
            starts = inputs.kv_lens - inputs.query_starts.diff()
            self._rows.drafted.computed_with(inputs.rows.long(), starts, inputs.kv_lens, layout.num_decode)
        return inputs, hidden

    def _settle_drafts(self, flat: FlatPlan, inputs: StepInputs) -> None:
        """Writes drafts and lengths into the inputs; not captured, because its work depends on the step's drafts."""
        settle_drafts(inputs, self._rows, DraftSequences.of(flat, partial(integers_to_device, self._stream)))

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        return self._model.forward(build_batch(inputs, self._rows, self._page_size, self._table))

    def _logits(self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        count = int(np.count_nonzero(plan.samples))
        if count == plan.num_decode == len(plan.rows):
            last = hidden[:count]
        else:
            sampled = inputs.sampled[:count].long()
            last = hidden[inputs.query_starts[1:][sampled].long() - 1]
        return self._model.logits(last)

    def _sample(
        self, plan: StepPlan, inputs: StepInputs, logits: torch.Tensor, needs: Needs, masks: TokenMasks | None
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """Samples the sequences' tokens, stores them in their rows, and returns the tokens to report, with logprobs."""
        sampled = inputs.sampled[: len(logits)].long()
        masked = None if masks is None else self._masked_lines(plan, masks)
        rows, kv_lens = inputs.rows[sampled].long(), inputs.kv_lens[sampled]
        tokens = sample(logits, self._sampling, rows, kv_lens, needs, self._sampler, masked)
        reported = self._store_tokens(inputs, sampled, rows, kv_lens, tokens)
        if needs & Needs.PENALTIES:
            self._sampling.count(rows, reported)
        if plan.top_logprobs == NO_LOGPROBS:
            return reported, None
        return reported, token_logprobs(logits, tokens, plan.top_logprobs)

    def _store_tokens(
        self, inputs: StepInputs, sampled: torch.Tensor, rows: torch.Tensor, kv_lens: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Stores the `tokens` of the sequences `sampled` in their `rows`, `[n]` each, and returns the tokens to report
        to the host: `REJECTED` after a rejected draft."""
        known = self._rows.known
        if known is None:
            self._rows.last_tokens.index_copy_(0, rows, tokens)
            return tokens
        draft_numbers = inputs.flags[sampled] // DRAFT_NUMBER
        kept, last = kept_samples(draft_numbers, inputs.own[sampled], tokens, self._spec.max_samples - 1)
        self._rows.last_tokens.index_copy_(0, torch.where(last, rows, self._dump_row), tokens)
        known.append(rows, kv_lens, tokens, kept, last)
        if self._rows.drafted is not None:
            self._rows.drafted.drop_rejected(known)
        return torch.where(kept, tokens, REJECTED)

    def _masked_lines(self, plan: StepPlan, masks: TokenMasks) -> MaskedLines:
        assert plan.masked is not None
        lines = np.flatnonzero(plan.masked[plan.samples]).astype(np.int32)
        return MaskedLines(
            integers_to_device(self._stream, lines).long(), integers_to_device(self._stream, masks.words)
        )

    def _prompt_logprobs(
        self, plan: StepPlan, inputs: StepInputs, wanted: PromptLogprobs, hidden: torch.Tensor
    ) -> Logprobs:
        start = plan.place_of(wanted)
        if wanted.sequence >= plan.num_decode:
            start += inputs.num_decode - plan.num_decode  # padding of a captured step
        targets = integers_to_device(self._stream, wanted.targets)
        part = hidden[start : start + len(wanted.targets)]
        return prompt_logprobs(part, targets, plan.prompt_top_logprobs, self._model.logits)

    def _pooled(self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor) -> list[torch.Tensor]:
        if not plan.pooled:
            return []
        padding = inputs.num_decode - plan.num_decode  # of a captured step
        ends = np.cumsum(plan.query_lens) + padding
        chunks = [
            (int(ends[part.sequence] - plan.query_lens[part.sequence]), int(ends[part.sequence]))
            for part in plan.pooled
        ]
        if self._spec.pooling is Pooling.MEAN:
            return [sum_of(hidden[start:end]) for start, end in chunks]
        first = self._spec.pooling is Pooling.CLS
        places = np.array([start if first else end - 1 for start, end in chunks], np.int32)
        found = self._model.logits(hidden[integers_to_device(self._stream, places).long()])
        if self._spec.pooling is not None:
            return list(found)
        ids = [integers_to_device(self._stream, part.token_ids) for part in plan.pooled if part.token_ids is not None]
        logprobs = torch.log_softmax(found, dim=-1)
        return [own[each.long()] for own, each in zip(logprobs, ids, strict=True)]

    def _replace_rows(self, updates: tuple[SamplingUpdate, ...]) -> None:
        packed = pack_row_updates(updates, len(updates), self._dump_row, self._spec.vocab_size)
        self._sampling.apply(integers_to_device(self._stream, packed))
        for update in updates:
            if update.history is not None:
                occurrences = count_history(update, self._spec.vocab_size)
                self._sampling.set_occurrences(update.row, integers_to_device(self._stream, occurrences))

    def _apply_deltas(self, deltas: PageDeltas) -> None:
        entries = np.stack([deltas.rows, deltas.columns, deltas.pages])
        rows, columns, pages = integers_to_device(self._stream, entries)
        self._rows.page_table.index_put_((rows.long(), columns.long()), pages)

    def _logprobs_to_host(self, found: Logprobs) -> Logprobs:
        return Logprobs(*(self._stream.to_host(part) for part in (found.logprobs, found.top_ids, found.top_logprobs)))

    def _run_padding(self, layout: StepLayout) -> None:
        """Runs a step of padding, which reads and writes page 0; samples greedily, randomly and with all filters."""
        packed = np.zeros(layout.size, np.int32)
        inputs = layout.unpack(integers_to_device(self._stream, packed))
        inputs.rows.fill_(self._dump_row)
        if layout.tokens:
            inputs.query_starts[1:] = inputs.kv_lens[:] = layout.tokens
        else:
            torch.arange(layout.rows + 1, dtype=torch.int32, out=inputs.query_starts)
        logits = self._model.logits(self._forward(inputs)[: layout.sampled])
        if self._spec.pooling is not None:
            return
        rows, kv_lens = inputs.rows[: layout.sampled].long(), inputs.kv_lens[: layout.sampled]
        for needs in (Needs.NOTHING, Needs.RANDOM, Needs.everything()):
            tokens = sample(logits, self._sampling, rows, kv_lens, needs, self._sampler)
        token_logprobs(logits, tokens, LOGPROB_BUCKETS[-1])

"""Runs plans on devices with JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sglang_jax.architectures.pooling import Pooling
from sglang_jax.jax_runner.buckets import Bucket
from sglang_jax.jax_runner.compiles import CompileCounter
from sglang_jax.jax_runner.drafter import Drafter
from sglang_jax.jax_runner.logprobs import Logprobs
from sglang_jax.jax_runner.programs import DELTA_BLOCK, Programs
from sglang_jax.jax_runner.step import DeviceOutputs, DeviceState, KVCaches, Weights, empty_rows, pack_settled
from sglang_jax.layers.pooler import whole_sums
from sglang_jax.runner.drafts import FlatPlan, flatten_drafts, pack_hints, pack_texts, restore_rows
from sglang_jax.runner.expert_load import ExpertLoad, load_since
from sglang_jax.runner.page_tables import side_by_side
from sglang_jax.runner.plan import (
    LAST_TOKEN,
    NO_LOGPROBS,
    Float64,
    PageDeltas,
    RowUpdates,
    RunnerSpec,
    StepPlan,
    StepResult,
    TokenMasks,
    TopLogprobs,
    check_plan,
    mask_words,
    one_each,
)
from sglang_jax.runner.protocol import RunnerReport, cannot_reload
from sglang_jax.runner.pulse import Building
from sglang_jax.runner.row_updates import count_history, pack_row_updates
from sglang_jax.sampling.wants import MAX_SCORED_TOKENS

Update = TypeVar("Update")


@dataclass(slots=True)
class JaxStep:
    """A launched step. JAX dispatches asynchronously, and reading an output waits for it. `second` starts the second
    part, which completes `outputs`; None without one. `max_samples`, `pooling`: of the runner. `pooled`: vectors of the
    sequences, or scores of tokens, if the plan asks for any."""

    flat: FlatPlan
    outputs: DeviceOutputs
    max_samples: int
    second: Callable[[FlatPlan, DeviceOutputs, TokenMasks], DeviceOutputs] | None = None
    pooled: jax.Array | None = None
    pooling: Pooling | None = None

    @property
    def plan(self) -> StepPlan:
        """The plan with one sequence per sampling query."""
        return self.flat.plan

    def sample(self, masks: TokenMasks) -> None:
        """See `StepHandle`. Raises `RuntimeError` for a step that does not wait for masks."""
        if self.second is None:
            raise RuntimeError(f"step {self.plan.step} waits for no masks")
        self.outputs, self.second = self.second(self.flat, self.outputs, masks), None

    def result(self) -> StepResult:
        """Blocks until the step has run, and copies only the outputs that the plan asks for to the host."""
        assert self.second is None, f"step {self.plan.step} waits for its masks"
        plan, outputs = self.plan, self.outputs
        tokens = np.asarray(outputs.tokens)[: len(plan.rows)]
        logprobs = None
        if plan.top_logprobs != NO_LOGPROBS:
            logprobs = _on_host(outputs.logprobs, 0, len(plan.rows), plan.top_logprobs)
        found = StepResult(*one_each(tokens, plan.samples), logprobs, self._prompt_logprobs(), self._pooled())
        return restore_rows(self.flat, found, self.max_samples)

    def _pooled(self) -> tuple[Float64, ...]:
        if self.pooled is None:
            return ()
        found = np.asarray(self.pooled)
        if self.pooling is Pooling.MEAN:
            return tuple(whole_sums(found[part.sequence]) for part in self.plan.pooled)
        widths = (None if part.token_ids is None else len(part.token_ids) for part in self.plan.pooled)
        parts = zip(self.plan.pooled, widths, strict=True)
        return tuple(found[part.sequence, :width].astype(np.float64) for part, width in parts)

    def _prompt_logprobs(self) -> tuple[TopLogprobs, ...]:
        plan, found = self.plan, self.outputs.prompt_logprobs
        if not plan.prompt_logprobs or found is None:
            return ()
        return tuple(
            _on_host(found, plan.place_of(wanted), len(wanted.targets), plan.prompt_top_logprobs)
            for wanted in plan.prompt_logprobs
        )


def _on_host(found: Logprobs, start: int, count: int, alternatives: int) -> TopLogprobs:
    part = slice(start, start + count)
    return TopLogprobs(
        np.asarray(found.logprobs)[part],
        np.asarray(found.top_ids)[part, :alternatives],
        np.asarray(found.top_logprobs)[part, :alternatives],
    )


class JaxRunner:
    """The `Runner` on one device, or on a mesh of several.

    A launch packs the plan into one array, calls the compiled program of the smallest bucket that the plan fits, and
    returns. The device runs launches in order, since each takes the state that the previous one returned. The runner
    takes over `weights` and `kv`: it writes `kv` in place, and `close` frees both. `mesh`: of these, None for JAX's
    default device; `counted`: indices of layers that count the tokens of their experts; `reload`: loads weights of
    the model from another checkpoint, or again (None); `num_weights`: those of the model, without a draft model.
    """

    def __init__(
        self,
        programs: Programs,
        weights: Weights,
        kv: KVCaches,
        spec: RunnerSpec,
        details: Mapping[str, str],
        mesh: Mesh | None = None,
        counted: tuple[int, ...] = (),
        reload: Callable[[str | None], Weights] = cannot_reload,
        num_weights: int = 0,
    ) -> None:
        self._spec = spec
        self._details = dict(details)
        self._reload = reload
        self._num_weights = num_weights
        self._path: str | None = None
        placement = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self._state = DeviceState(kv, *empty_rows(spec, placement, drafted=programs.draft is not None))
        self._weights = weights
        self._weight_bytes = _nbytes(weights)
        self._kv_bytes = _nbytes(kv)
        self._device = next(iter(self._state.last_tokens.devices()))
        self._programs = programs
        self._drafter = None if programs.draft is None else Drafter(programs, weights, spec.max_rows)
        self._counter = CompileCounter()
        self._compiles_in_warm_up = 0
        self._counted = counted
        self._load_in_warm_up: tuple[ExpertLoad, ...] = ()
        self._waiting: JaxStep | None = None
        self._profiling = False

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def warm_up(self, progress: Callable[[int, int, str], None], *, first_only: bool = False) -> None:
        """See `Runner`. Programs run in the same order in every process of a group."""
        programs = self._programs
        names = programs.needed_first() if first_only else list(programs.builders())
        steps = [bucket for bucket in programs.buckets if str(bucket) in names]
        drafts = [] if self._drafter is None else [name for name in names if name.startswith(("draft", "catch up"))]
        rows = {bucket.rows for bucket in steps if f"sample {bucket.rows} rows" in names}
        total = len(names) + len(steps) + len(rows) + len(drafts)
        programs.build(names, lambda done, _, what: progress(done, total, what))
        ran: dict[int, tuple[StepPlan, DeviceOutputs]] = {}
        for done, bucket in enumerate(steps, len(names) + 1):
            pools = programs.pooling is not None
            plan = warmup_plan(bucket, programs.dump_row, self._spec.max_context, pools=pools)
            packed = programs.layouts[bucket].pack(plan, plan.page_deltas[0])
            self._state, outputs = programs.step(bucket, self._weights, self._state, packed)
            outputs.tokens.block_until_ready()
            progress(done, total, f"running {bucket}")
            ran[bucket.rows] = plan, outputs
        for done, number in enumerate(sorted(rows), len(names) + len(steps) + 1):
            plan, found = ran[number]
            masked = replace(plan, masked=np.ones(len(plan.rows), np.bool_))
            masks = TokenMasks(np.full((len(plan.rows), mask_words(self._spec.vocab_size)), -1, np.int32))
            packed = programs.sample_layouts[number].pack(masked, masks)
            self._state, (tokens, _) = programs.sample(self._state, found, packed)
            tokens.block_until_ready()
            progress(done, total, f"running sample {number} rows")
        if self._drafter is not None:
            for done, (what, state) in enumerate(self._drafter.warm_up(self._state, drafts), total - len(drafts) + 1):
                self._state = state
                jax.block_until_ready(state.drafted)
                progress(done, total, f"running {what}")
        self._compiles_in_warm_up = self._counter.count
        self._load_in_warm_up = self._expert_load()
        if first_only:
            programs.build_others(self._counter.planned)

    def announce_builds(self, building: Building) -> None:
        self._programs.builds.building = building

    def launch(self, plan: StepPlan) -> JaxStep:
        """Starts a step and returns without waiting for it. Raises `ValueError`, before anything has changed, for a
        plan beyond the spec."""
        check_plan(plan, self._spec, states=self._programs.table.states)
        if self._waiting is not None and self._waiting.second is not None:
            raise RuntimeError(
                f"step {plan.step} was launched while step {self._waiting.plan.step} waits for its masks"
            )
        flat = flatten_drafts(plan)
        plan = flat.plan
        masked = plan.masked is not None
        bucket = self._programs.pick(plan.num_tokens, len(plan.rows), plan.num_decode, masked=masked)
        self._replace_rows(plan.row_updates)
        deltas = side_by_side(plan.page_deltas, self._programs.table.starts)
        deltas = self._apply_excess(deltas, 0 if self._has_drafts(flat) else bucket.deltas)
        if self._drafter is not None:
            if self._has_drafts(flat):
                self._state = self._drafter.propose(self._state, flat)
            self._drafter.launched(flat)
        packed = self._programs.layouts[bucket].pack(plan, deltas, flat.draft_numbers)
        with jax.profiler.StepTraceAnnotation("step", step_num=plan.step) if self._profiling else nullcontext():
            self._state, outputs = self._programs.step(bucket, self._weights, self._state, packed)
        pooled = None if not plan.pooled else self._pooled(plan, outputs)
        if plan.masked is None:
            self._settle(flat)
            outputs.tokens.copy_to_host_async()
            outputs = replace(outputs, logits=outputs.tokens)  # frees the logits, which are not needed any more
            return JaxStep(flat, outputs, self._spec.max_samples, None, pooled, self._spec.pooling)
        self._waiting = JaxStep(flat, outputs, self._spec.max_samples, self._sample, pooled)
        return self._waiting

    def _pooled(self, plan: StepPlan, outputs: DeviceOutputs) -> jax.Array:
        if self._spec.pooling is not None:
            pooled = outputs.logits
        else:
            token_ids = np.zeros((len(outputs.logits), MAX_SCORED_TOKENS), np.int32)
            for part in plan.pooled:
                if part.token_ids is not None:
                    token_ids[part.sequence, : len(part.token_ids)] = part.token_ids
            pooled = self._programs.token_scores(outputs, token_ids)
        pooled.copy_to_host_async()
        return pooled

    def _sample(self, flat: FlatPlan, outputs: DeviceOutputs, masks: TokenMasks) -> DeviceOutputs:
        packed = self._programs.sample_layouts[len(outputs.logits)].pack(flat.plan, masks, flat.draft_numbers)
        self._state, (tokens, logprobs) = self._programs.sample(self._state, outputs, packed)
        self._settle(flat)
        tokens.copy_to_host_async()
        return DeviceOutputs(tokens, logprobs, outputs.prompt_logprobs, tokens)

    def _settle(self, flat: FlatPlan) -> None:
        """After sampling, moves the states after rows' last accepted drafts to their slots."""
        programs = self._programs
        if programs.settles_states and flat.draft_numbers.any():
            packed = pack_settled(flat, self._spec.max_rows, programs.dump_row, programs.table.first_draft_slot)
            self._state = programs.settle(self._state, packed)

    def load_weights(self, model_path: str) -> None:
        """See `Runner`. The programs stay: they take the weights as arguments."""
        self._take(self._reload(model_path))
        self._path = self._details["weights_path"] = model_path

    def _take(self, main: Weights) -> None:
        """Replaces the model's weights, and keeps those of a draft model."""
        jax.block_until_ready((_unless_deleted(self._state), main))
        replaced, draft = self._weights[: self._num_weights], self._weights[self._num_weights :]
        self._weights = [*main, *draft]
        self._weight_bytes = _nbytes(self._weights)
        if self._drafter is not None:
            self._drafter.use(self._weights)
        _delete(replaced)

    def release_memory(self, *, weights: bool, kv: bool) -> None:
        jax.block_until_ready(_unless_deleted(self._state))
        if weights:
            _delete(self._weights[: self._num_weights])
            self._weight_bytes = _nbytes(self._weights[self._num_weights :])
        if kv:
            _delete(_pages(self._state.kv))
            self._kv_bytes = 0

    def resume_memory(self, *, weights: bool, kv: bool) -> None:
        if weights:
            self._take(self._reload(self._path))
        if kv:
            self._state = replace(self._state, kv=jax.tree.map(_made_again, self._state.kv))
            self._kv_bytes = _nbytes(self._state.kv)

    def start_profile(self, folder: str) -> None:
        """See `Runner`. `folder`: any that JAX can write to, also `gs://`."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # with it, Python calls take several times as long
        jax.profiler.start_trace(folder, profiler_options=options)
        self._profiling = True

    def stop_profile(self) -> None:
        self._profiling = False
        jax.block_until_ready(self._state)
        jax.profiler.stop_trace()

    def report(self) -> RunnerReport:
        builds = self._programs.builds
        failed = {"failed_programs": ", ".join(builds.failed)} if builds.failed else {}
        return RunnerReport(
            backend="jax",
            device=f"{self._device.platform} ({self._device.device_kind})",
            compiled_programs=len(self._programs),
            compiles_after_warm_up=self._counter.count - self._compiles_in_warm_up,
            weight_bytes=self._weight_bytes,
            kv_bytes=self._kv_bytes,
            details=self._details | failed,
            programs_left=builds.num_left,
        )

    def expert_load(self) -> tuple[ExpertLoad, ...]:
        return load_since(self._load_in_warm_up, self._expert_load())

    def _expert_load(self) -> tuple[ExpertLoad, ...]:
        """The counts with those of the warm-up, which are the same on every device."""
        words = jax.device_get([self._state.kv[layer].expert_tokens for layer in self._counted])
        return tuple(
            ExpertLoad(layer, low.astype(np.int64) + (high.astype(np.int64) << 32))
            for layer, (low, high) in zip(self._counted, words, strict=True)
        )

    def close(self) -> None:
        """Waits for launched steps, and frees the device's memory. Cancels builds that do not run yet."""
        self._programs.abandon()
        jax.block_until_ready(_unless_deleted(self._state))
        self._counter.close()
        _delete((self._state, self._weights))

    def _replace_rows(self, updates: RowUpdates) -> None:
        """Sets sampling state, texts and hints of rows, in the fewest runs of the fixed sizes."""
        sampling, known = self._state.sampling, self._state.known
        for size, batch in _in_batches(updates.sampling, self._programs.row_update_sizes):
            packed = pack_row_updates(batch, size, self._programs.dump_row, self._spec.vocab_size)
            sampling = self._programs.update_rows(sampling, packed)
        for update in updates.sampling:
            if update.history is not None:
                occurrences = count_history(update, self._spec.vocab_size)
                sampling = self._programs.set_occurrences(sampling, update.row, occurrences)
        if known is not None:
            for size, texts in _in_batches(updates.texts, self._programs.text_sizes):
                packed = pack_texts(texts, size, self._programs.dump_row, self._spec.max_context + 1)
                known = self._programs.set_known_tokens(known, packed)
            for size, hints in _in_batches(updates.hints, self._programs.text_sizes):
                known = self._programs.set_hints(known, pack_hints(hints, size, self._programs.dump_row))
        self._state = replace(self._state, sampling=sampling, known=known)

    def _has_drafts(self, flat: FlatPlan) -> bool:
        return self._drafter is not None and bool(flat.draft_numbers.any())

    def _apply_excess(self, deltas: PageDeltas, most: int) -> PageDeltas:
        """Applies all deltas if they are more than the step's program takes. Returns those left for the step."""
        count = len(deltas.rows)
        if count <= most:
            return deltas
        page_table = self._state.page_table
        for start in range(0, count, DELTA_BLOCK):
            page_table = self._programs.apply_deltas(page_table, deltas[start : start + DELTA_BLOCK])
        self._state = replace(self._state, page_table=page_table)
        return deltas[:0]


def _in_batches(updates: Sequence[Update], sizes: tuple[int, ...]) -> Iterator[tuple[int, Sequence[Update]]]:
    """Parts of `updates`, each with the smallest of `sizes` that is enough, or the largest."""
    while updates:
        size = next((size for size in sizes if size >= len(updates)), sizes[-1])
        yield size, updates[:size]
        updates = updates[size:]


def _unless_deleted(tree: object) -> list[jax.Array]:
    return [array for array in jax.tree.leaves(tree) if not array.is_deleted()]


def _made_again(array: jax.Array) -> jax.Array:
    """Zeros like a deleted array; other arrays stay."""
    return jnp.zeros(array.shape, array.dtype, device=array.sharding) if array.is_deleted() else array


def _delete(tree: object) -> None:
    for array in _unless_deleted(tree):
        array.delete()


def _pages(kv: KVCaches) -> list[KVCaches]:
    """Pages and states, without the counters of experts."""
    return [replace(memory, expert_tokens=None) for memory in kv]


def _nbytes(tree: Weights | KVCaches) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(tree))


def warmup_plan(bucket: Bucket, dump_row: int, max_context: int, *, pools: bool = False) -> StepPlan:
    """A plan for the warm-up, since the first run of a program is slow: XLA's CPU backend prepares matrix products (0.3
    to 0.7 s for a step of SmolLM2-135M on 2 cores), and an accelerator loads the program.

    It computes like a real plan and fills the bucket: decode rows, and in a mixed bucket one of them with a prompt. No
    sequence samples. All are in the dump row, whose pages are all page 0, where they overwrite each other's keys and
    values."""
    if bucket.decode_only:
        num_decode, prompt = bucket.rows, 0
    else:
        num_decode = 0 if pools else min(1, bucket.rows - 1)
        prompt = min(bucket.tokens - num_decode, max_context)
    lengths = np.array([1] * num_decode + [prompt] * (prompt > 0), np.int32)
    nothing = np.zeros(0, np.int32)
    return StepPlan(
        step=0,
        rows=np.full(len(lengths), dump_row, np.int32),
        num_decode=num_decode,
        query_lens=lengths,
        kv_lens=lengths,
        tokens=np.concatenate((np.full(num_decode, LAST_TOKEN, np.int32), np.zeros(prompt, np.int32))),
        samples=np.zeros(len(lengths), bool),
        page_deltas=(PageDeltas(nothing, nothing, nothing),),
    )

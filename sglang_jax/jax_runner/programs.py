"""The compiled programs of a runner, built ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import zip_longest

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sglang_jax.jax_runner.buckets import Bucket, Buckets
from sglang_jax.jax_runner.builds import Around, Build, Builds, Executable
from sglang_jax.jax_runner.compiler_options import options_of_step
from sglang_jax.jax_runner.draft_model import (
    CATCH_UP_TOKENS,
    Draft,
    DraftModel,
    DraftState,
    RowState,
    make_catch_up,
    make_draft,
)
from sglang_jax.jax_runner.drafts import KnownTokens, set_hints, set_known_tokens
from sglang_jax.jax_runner.logprobs import Logprobs
from sglang_jax.jax_runner.packing import SampleLayout, StepLayout
from sglang_jax.jax_runner.readers import logits_sharding
from sglang_jax.jax_runner.sampling_state import SamplingState, apply_row_updates, set_occurrences
from sglang_jax.jax_runner.step import (
    DeviceOutputs,
    DeviceState,
    ModelFunctions,
    SampledState,
    Weights,
    apply_deltas,
    make_sample,
    make_settle,
    make_step,
    make_token_scores,
)
from sglang_jax.models.kv_cache import states_of, with_states
from sglang_jax.runner.page_tables import ONE_GROUP, TableLayout
from sglang_jax.runner.plan import Int32, PageDeltas, mask_words
from sglang_jax.runner.row_updates import PACKED_ROW
from sglang_jax.sampling.wants import MAX_SCORED_TOKENS

DELTA_BLOCK = 1024
"""Maximum page-table entries of one run of the delta program."""

_PROMPT_OF_A_SHORT_ANSWER = 64
"""Tokens of a short prompt: a question of a line or two in a chat template."""


class Programs:
    """Builds each program at its first use, or before that on other threads: see `Builds`. `weights` and `state` may be
    shapes with shardings, so that programs can be built while weights are read; with `draft`, they are those of both
    models. `max_drafts`: of a row in a step.

    Programs are called as compiled executables, without tracing or looking up shapes. Each takes the state that it
    changes donated (KV pages are written in place) and returns it. Numpy arguments are read while the program runs, so
    they must not change afterwards.
    """

    def __init__(
        self,
        model: ModelFunctions,
        weights: Weights,
        state: DeviceState,
        buckets: Buckets,
        page_size: int,
        mesh: Mesh | None = None,
        table: TableLayout = ONE_GROUP,
        max_drafts: int = 0,
        draft: DraftModel | None = None,
    ) -> None:
        self._model = model if draft is None else draft.combined_with(model)
        self.draft = draft
        self._weight_shapes = jax.tree.map(_shape_of, weights)
        self._state_shapes = jax.tree.map(_shape_of, state)
        self._placement = jax.tree.map(lambda array: array.sharding, state)
        self._page_size = page_size
        self._mesh = mesh
        self.table = table
        self._max_drafts = max_drafts
        self.buckets = buckets
        self.dump_row = state.last_tokens.shape[0] - 1
        self.vocab_size = state.sampling.vocab_size
        self.layouts = {bucket: StepLayout(bucket, self.dump_row, states=table.states) for bucket in buckets}
        words = mask_words(self.vocab_size)
        self.pooling = model.pooling
        rows_of_steps = {one.rows for one in buckets} if self.pooling is None else set()
        self.sample_layouts = {rows: SampleLayout(rows, words, self.dump_row) for rows in rows_of_steps}
        self.settles_states = table.states and max_drafts > 0
        self.row_update_sizes = tuple(sorted({1, min(8, self.dump_row), self.dump_row}))
        self.text_sizes = self.row_update_sizes[:2]  # each text takes as much memory as a context
        rows = self.dump_row
        self.draft_sizes = () if draft is None else tuple(b.rows for b in buckets.decode if b.rows < rows) or (rows,)
        self.catch_up_sizes = () if draft is None else CATCH_UP_TOKENS
        self._logits_columns: int | None = None
        self.builds = Builds()

    def __len__(self) -> int:
        return len(self.builds)

    def step(
        self, bucket: Bucket, weights: Weights, state: DeviceState, packed: Int32
    ) -> tuple[DeviceState, DeviceOutputs]:
        """Runs one step; `packed` is in the bucket's layout."""
        return self.builds.get(str(bucket), lambda: self._build_step(bucket))(weights, state, packed)

    def sample(
        self, state: DeviceState, found: DeviceOutputs, packed: Int32
    ) -> tuple[DeviceState, tuple[jax.Array, Logprobs]]:
        """Runs the second part of a step with masks, whose first part returned `found`. `packed`: in the layout for the
        same number of rows. Returns tokens and logprobs."""
        rows = len(found.logits)
        program = self.builds.get(f"sample {rows} rows", lambda: self._build_sample(rows))
        sampled, outputs = program(SampledState.of(state), found.logits, found.tokens, packed)
        state = replace(
            state,
            last_tokens=sampled.last_tokens,
            sampling=sampled.sampling,
            known=sampled.known,
            drafted=sampled.drafted,
        )
        return state, outputs

    def token_scores(self, found: DeviceOutputs, token_ids: Int32) -> jax.Array:
        """The logprobs of `token_ids` `[R, MAX_SCORED_TOKENS]` after the last query of each sequence of a step."""
        rows = len(found.logits)
        return self.builds.get(f"scores {rows} rows", lambda: self._build_scores(rows))(found.logits, token_ids)

    def propose(self, weights: Weights, state: DeviceState, packed: Int32) -> DeviceState:
        """Runs the draft model's drafts for one of `draft_sizes` rows; see `make_draft`."""
        size = packed.shape[1]
        program = self.builds.get(f"draft {size} rows", lambda: self._build_draft(size))
        return self._run_draft(program, weights, state, packed)

    def catch_up(self, weights: Weights, state: DeviceState, packed: Int32) -> DeviceState:
        """Has the draft model compute one of `catch_up_sizes` tokens; see `make_catch_up`."""
        size = packed.shape[1]
        program = self.builds.get(f"catch up {size} tokens", lambda: self._build_catch_up(size))
        return self._run_draft(program, weights, state, packed)

    def _run_draft(self, program: Executable, weights: Weights, state: DeviceState, packed: Int32) -> DeviceState:
        draft = self._draft_model
        found = program(draft.own(weights), *self._parts(state), packed)
        models, _ = draft.split(state.kv)
        return replace(state, kv=(*models, *found.kv), drafted=found.drafted)

    @property
    def _draft_model(self) -> DraftModel:
        assert self.draft is not None, "a runner with a draft model"
        return self.draft

    def _parts(self, state: DeviceState) -> tuple[DraftState, RowState]:
        assert state.known is not None
        assert state.drafted is not None
        _, kv = self._draft_model.split(state.kv)
        return DraftState(kv, state.drafted), RowState(state.page_table, state.known, state.sampling)

    def settle(self, state: DeviceState, packed: Int32) -> DeviceState:
        """Moves the states after rows' last accepted drafts to their slots; see `make_settle`."""
        assert state.known is not None, "a runner that drafts"
        program = self.builds.get("settle states", self._build_settle)
        states = program(states_of(state.kv), state.page_table, state.known.accepted, packed)
        return replace(state, kv=with_states(state.kv, states))

    def update_rows(self, sampling: SamplingState, packed: Int32) -> SamplingState:
        """Replaces the parameters of one of `row_update_sizes` rows."""
        size = len(packed)
        return self.builds.get(f"update {size} rows", lambda: self._build_row_updates(size))(sampling, packed)

    def set_occurrences(self, sampling: SamplingState, row: int, occurrences: Int32) -> SamplingState:
        """Replaces a row's counts of tokens; `occurrences` int32 `[vocab]`."""
        return self.builds.get("set occurrences", self._build_occurrences)(sampling, np.int32(row), occurrences)

    def set_known_tokens(self, known: KnownTokens, packed: Int32) -> KnownTokens:
        """Replaces the texts of one of `text_sizes` rows; see `drafts.set_known_tokens`."""
        size = len(packed)
        return self.builds.get(f"texts of {size} rows", lambda: self._build_known_tokens(size))(known, packed)

    def set_hints(self, known: KnownTokens, packed: Int32) -> KnownTokens:
        """Replaces the hints of one of `text_sizes` rows; see `pack_hints`."""
        size = len(packed)
        return self.builds.get(f"hints of {size} rows", lambda: self._build_hints(size))(known, packed)

    def apply_deltas(self, page_table: jax.Array, deltas: PageDeltas) -> jax.Array:
        """Overwrites at most `DELTA_BLOCK` entries of the page table."""
        count = len(deltas.rows)
        packed = np.zeros((3, DELTA_BLOCK), np.int32)
        packed[0] = self.dump_row
        packed[:, :count] = (deltas.rows, deltas.columns, deltas.pages)
        return self.builds.get("page deltas", self._build_deltas)(page_table, packed)

    def begin(self, names: Iterable[str]) -> None:
        """Starts to build the named programs on other threads, in order, and returns at once. A program that is used
        before its build is done is waited for."""
        builders = self.builders()
        self.builds.begin({name: builders[name] for name in names})

    def abandon(self) -> None:
        self.builds.abandon()

    def of_short_answers(self) -> list[str]:
        """Names of the programs for one short prompt and its answer."""
        row_update = f"update {self.row_update_sizes[0]} rows"
        tokens = min(_PROMPT_OF_A_SHORT_ANSWER, self.buckets.mixed[-1].tokens)
        prompt = self.buckets.pick(tokens, num_rows=1, num_decode=0)
        return [str(prompt), row_update, *map(str, self.buckets.decode[:1])]

    def needed_first(self) -> list[str]:
        """Names of programs such that every step fits one, the slowest builds first: the largest steps, and the
        smallest for the first answers."""
        decode, mixed = self.buckets.decode, self.buckets.mixed
        steps = list(dict.fromkeys(map(str, (mixed[-1], *decode[-1:], *decode[:1], *mixed[: not decode]))))
        later = {str(bucket) for bucket in self.buckets}
        for what in ("sample", "scores"):
            later |= {f"{what} {rows} rows" for rows in self.sample_layouts if rows < mixed[-1].rows}
        later |= {f"draft {size} rows" for size in self.draft_sizes[:-1]}
        return [*steps, *(name for name in self.builders() if name not in later)]

    def build(self, names: Iterable[str], progress: Callable[[int, int, str], None]) -> None:
        builders = self.builders()
        self.builds.build({name: builders[name] for name in names}, progress)

    def build_others(self, around: Around) -> None:
        """Builds all other programs in the background, small ones first. Until then, larger programs are used
        instead."""
        pairs = zip_longest(self.buckets.mixed, self.buckets.decode)
        steps = [bucket for pair in pairs for bucket in pair if bucket is not None]
        builders = self.builders()
        wanted = (name for bucket in steps for name in (str(bucket), f"sample {bucket.rows} rows"))
        names = [name for name in wanted if name in builders]
        self.builds.build_in_background({name: builders[name] for name in dict.fromkeys([*names, *builders])}, around)

    def pick(self, num_tokens: int, num_rows: int, num_decode: int, *, masked: bool = False) -> Bucket:
        """`Buckets.pick`, preferring built programs during background builds. `masked`: if the step has a second
        part."""
        usable = None if self.builds.complete else partial(self._is_built, masked)
        return self.buckets.pick(num_tokens, num_rows, num_decode, usable)

    def draft_size(self, rows: int) -> int:
        """The smallest of `draft_sizes` for `rows` rows, preferring built programs during background builds."""
        sizes = [size for size in self.draft_sizes if size >= rows]
        built = [size for size in sizes if self.builds.complete or f"draft {size} rows" in self.builds]
        return (built or sizes)[0]

    def _is_built(self, masked: bool, bucket: Bucket) -> bool:
        return str(bucket) in self.builds and (not masked or f"sample {bucket.rows} rows" in self.builds)

    def builders(self) -> dict[str, Build]:
        """The function that builds each program, by name; the slowest builds first."""
        steps = reversed(list(self.buckets))
        return {
            **{str(bucket): partial(self._build_step, bucket) for bucket in steps},
            **{f"sample {rows} rows": partial(self._build_sample, rows) for rows in sorted(self.sample_layouts)},
            **{f"scores {rows} rows": partial(self._build_scores, rows) for rows in sorted(self.sample_layouts)},
            **{f"draft {size} rows": partial(self._build_draft, size) for size in self.draft_sizes},
            **{f"catch up {size} tokens": partial(self._build_catch_up, size) for size in self.catch_up_sizes},
            **{f"update {size} rows": partial(self._build_row_updates, size) for size in self.row_update_sizes},
            **{
                f"texts of {size} rows": partial(self._build_known_tokens, size)
                for size in self.text_sizes
                if self._state_shapes.known is not None
            },
            **{
                f"hints of {size} rows": partial(self._build_hints, size)
                for size in self.text_sizes
                if self._state_shapes.known is not None and self.draft is None
            },
            **({"settle states": self._build_settle} if self.settles_states else {}),
            "set occurrences": self._build_occurrences,
            "page deltas": self._build_deltas,
        }

    def _build_step(self, bucket: Bucket) -> Executable:
        layout = self.layouts[bucket]
        step = jax.jit(
            make_step(self._model, layout, self._page_size, self._mesh, self.table, self._max_drafts),
            donate_argnums=1,
            out_shardings=(self._placement, self._outputs_placement()),
        )
        # Kernels need the mesh, to run on each device, and its kind of chip.
        with nullcontext() if self._mesh is None else jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            lowered = step.lower(self._weight_shapes, self._state_shapes, _integers(layout.size))
        self._logits_columns = lowered.out_info[1].logits.shape[1]
        return lowered.compile(compiler_options=self._options(bucket.decode_only))

    def _options(self, decode_only: bool) -> dict[str, str]:
        device = jax.devices()[0] if self._mesh is None else self._mesh.devices.flat[0]
        return options_of_step(device.platform, device.device_kind, decode_only)

    def _build_draft(self, rows: int) -> Executable:
        build = make_draft(self._draft_model, rows, self._page_size, self._mesh, self.table)
        return self._compile_draft(build, (2, rows), decode_only=True)

    def _build_catch_up(self, tokens: int) -> Executable:
        build = make_catch_up(self._draft_model, tokens, self._page_size, self._mesh, self.table)
        return self._compile_draft(build, (3, tokens), decode_only=False)

    def _compile_draft(self, run: Draft, packed: tuple[int, int], *, decode_only: bool) -> Executable:
        placement, _ = self._parts(self._placement)
        program = jax.jit(run, donate_argnums=1, out_shardings=placement)
        weights = self._draft_model.own(self._weight_shapes)
        with nullcontext() if self._mesh is None else jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            lowered = program.lower(weights, *self._parts(self._state_shapes), _integers(*packed))
        return lowered.compile(compiler_options=self._options(decode_only))

    def _outputs_placement(self) -> DeviceOutputs | None:
        """The shardings of outputs: replicated, so that every node can read them, except logits, which no node
        reads."""
        if self._mesh is None:
            return None
        replicated = self._replicated()
        if self.pooling is not None:
            return replicated  # type: ignore[return-value]
        return DeviceOutputs(replicated, replicated, replicated, logits_sharding(self._mesh))  # type: ignore[arg-type]

    def _replicated(self) -> NamedSharding | None:
        return None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())

    def _build_sample(self, rows: int) -> Executable:
        layout = self.sample_layouts[rows]
        sample = jax.jit(
            make_sample(layout, self._mesh, self._max_drafts, self._model.tile_rows),
            donate_argnums=0,
            out_shardings=(SampledState.of(self._placement), self._replicated()),
        )
        shapes = SampledState.of(self._state_shapes)
        with nullcontext() if self._mesh is None else jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            tokens = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=self._replicated())
            lowered = sample.lower(shapes, self._logits_shape(rows), tokens, _integers(layout.size))
        return lowered.compile(compiler_options=self._options(decode_only=True))

    def _build_scores(self, rows: int) -> Executable:
        scores = jax.jit(make_token_scores(self.vocab_size, self._mesh), out_shardings=self._replicated())
        return scores.lower(self._logits_shape(rows), _integers(rows, MAX_SCORED_TOKENS)).compile()

    def _logits_shape(self, rows: int) -> jax.ShapeDtypeStruct:
        """The shape of the logits of a step with `rows` rows. Their width is known after building a step."""
        if self._logits_columns is None:
            smallest = self.buckets.decode[0]
            self.builds.get(str(smallest), partial(self._build_step, smallest))
        sharding = None if self._mesh is None else logits_sharding(self._mesh)
        return jax.ShapeDtypeStruct((rows, self._logits_columns), jnp.float32, sharding=sharding)

    def _build_row_updates(self, size: int) -> Executable:
        update = jax.jit(apply_row_updates, donate_argnums=0, out_shardings=self._placement.sampling)
        return update.lower(self._state_shapes.sampling, _integers(size, PACKED_ROW)).compile()

    def _build_known_tokens(self, size: int) -> Executable:
        known = self._state_shapes.known
        assert known is not None, "a runner that drafts"
        update = jax.jit(set_known_tokens, donate_argnums=0, out_shardings=self._placement.known)
        return update.lower(known, _integers(size, 2 + known.tokens.shape[1])).compile()

    def _build_hints(self, size: int) -> Executable:
        known = self._state_shapes.known
        assert known is not None, "a runner that drafts"
        update = jax.jit(set_hints, donate_argnums=0, out_shardings=self._placement.known)
        return update.lower(known, _integers(size, 1 + known.hints.shape[1])).compile()

    def _build_settle(self) -> Executable:
        shapes, known = self._state_shapes, self._state_shapes.known
        assert known is not None, "a runner that drafts"
        assert self.table.slots is not None, "a model that keeps states"
        run = make_settle(self.dump_row, self.table.slots, self._model.shards_on_device)
        settle = jax.jit(run, donate_argnums=0, out_shardings=states_of(self._placement.kv))
        packed = _integers(2, self.dump_row)
        return settle.lower(states_of(shapes.kv), shapes.page_table, known.accepted, packed).compile()

    def _build_occurrences(self) -> Executable:
        update = jax.jit(set_occurrences, donate_argnums=0, out_shardings=self._placement.sampling)
        return update.lower(self._state_shapes.sampling, _integers(), _integers(self.vocab_size)).compile()

    def _build_deltas(self) -> Executable:
        def apply(page_table: jax.Array, packed: jax.Array) -> jax.Array:
            return apply_deltas(page_table, *packed)

        update = jax.jit(apply, donate_argnums=0, out_shardings=self._placement.page_table)
        return update.lower(self._state_shapes.page_table, _integers(3, DELTA_BLOCK)).compile()


def _shape_of(array: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)

"""The steps of a warm-up: each program runs once, and nothing is kept."""

from __future__ import annotations

import pytest
from helpers.stand_in_jax import stand_in_runner
from helpers.stand_in_model import random_weights

from sglang_jax.jax_runner.buckets import Bucket, Buckets
from sglang_jax.jax_runner.programs import Programs
from sglang_jax.jax_runner.runner import warmup_plan
from sglang_jax.jax_runner.step import DeviceOutputs, DeviceState
from sglang_jax.runner.plan import Int32


@pytest.mark.parametrize(("max_rows", "token_budget", "max_context"), [(1, 16, 8), (5, 100, 4000), (32, 512, 300)])
def test_a_warmup_plan_fills_its_program_and_samples_nothing(
    max_rows: int, token_budget: int, max_context: int
) -> None:
    for bucket in Buckets.ladder(max_rows, token_budget, page_size=4):
        plan = warmup_plan(bucket, max_rows, max_context)
        assert plan.num_tokens == plan.query_lens.sum() <= bucket.tokens
        assert 0 < len(plan.rows) <= bucket.rows
        assert set(plan.rows) == {max_rows}
        assert not plan.samples.any()
        assert plan.kv_lens.max() <= max_context
        if bucket.decode_only:
            assert plan.num_decode == bucket.rows
        else:
            assert plan.num_tokens == min(bucket.tokens, max_context + plan.num_decode)


def test_warm_up_runs_every_program_of_steps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    step = Programs.step

    def recorded(self: Programs, bucket: Bucket, *arguments: object) -> object:
        ran.append(str(bucket))
        return step(self, bucket, *arguments)

    sample = Programs.sample

    def recorded_sample(self: Programs, state: DeviceState, found: DeviceOutputs, packed: Int32) -> object:
        ran.append(f"sample {len(found.logits)} rows")
        return sample(self, state, found, packed)

    monkeypatch.setattr(Programs, "step", recorded)
    monkeypatch.setattr(Programs, "sample", recorded_sample)
    runner = stand_in_runner(random_weights())
    seen: list[tuple[int, int, str]] = []
    runner.warm_up(lambda done, total, what: seen.append((done, total, what)))
    runner.close()
    assert len(set(ran)) == len(ran) > 4
    assert [what for _, _, what in seen][-len(ran) :] == [f"running {name}" for name in ran]
    assert [done for done, _, _ in seen] == list(range(len(seen)))
    assert {total for _, total, _ in seen} == {len(seen) - 1}
    assert set(ran) <= {what for _, _, what in seen}, "every program that ran had been built"

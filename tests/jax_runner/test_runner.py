"""The JAX runner's report, and when it builds its programs. `tests/runner` tests its interface."""

from __future__ import annotations

import numpy as np
from helpers.plan_driver import DECODE, PlanDriver
from helpers.stand_in_jax import stand_in_runner
from helpers.stand_in_model import VOCAB, random_weights

WEIGHTS = random_weights()
RNG = np.random.default_rng(11)


def test_the_report_describes_the_runner() -> None:
    runner = stand_in_runner(WEIGHTS)
    runner.warm_up(lambda done, total, what: None)
    report = runner.report()
    assert report.weight_bytes == sum(array.nbytes for array in WEIGHTS)
    assert report.kv_bytes == 2 * 100 * 4 * 2 * 16 * 4
    assert report.compiled_programs == 12
    assert report.compiles_after_warm_up == 0
    assert (report.backend, report.device) == ("jax", "cpu (cpu)")


def test_programs_are_built_at_first_use_without_warm_up_and_never_twice() -> None:
    runner = stand_in_runner(WEIGHTS, max_rows=8, page_size=1, num_pages=2000, max_context=256, token_budget=16)
    driver = PlanDriver(runner)
    owner = driver.admit(RNG.integers(0, VOCAB, 201).tolist())
    driver.step([(owner, 8)])
    driver.generate(owner, 2, chunk=16)
    built = runner.report().compiled_programs
    assert 0 < built < 7
    assert runner.report().compiles_after_warm_up > 0
    # Seven rows match 200 pages each in the cache: more than one run of the delta program takes.
    sharers = [driver.admit(owner.prompt) for _ in range(7)]
    for sharer in sharers:
        driver.share_prefix(owner, sharer, 200)
    driver.step([(sharer, 1) for sharer in sharers])
    assert {sharer.output[0] for sharer in sharers} == {owner.output[0]}
    compiles = runner.report().compiles_after_warm_up
    driver.step([(sharer, DECODE) for sharer in sharers])
    driver.step([(sharer, DECODE) for sharer in sharers])
    assert runner.report().compiles_after_warm_up - compiles == 1
    runner.close()

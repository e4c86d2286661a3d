"""Parts of a run over a cluster that need no Ray: its error texts, which the tests on a cluster use too."""

from __future__ import annotations

from sglang_jax.batch.options import describe_lack_of_nodes


def test_the_error_for_too_few_nodes_states_what_an_engine_needs_and_what_exists() -> None:
    needs = {"CPU": 3.0, "GPU": 1.0}
    assert describe_lack_of_nodes(needs, 1, 0) == "No node of the cluster has the 3 CPU, 1 GPU that an engine needs"
    assert describe_lack_of_nodes({"CPU": 0.5}, 2, 1) == "An engine needs 2 nodes with 0.5 CPU, but the cluster has 1"

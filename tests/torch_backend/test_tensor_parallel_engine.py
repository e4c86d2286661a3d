"""An engine over two processes: the text of one process, and a clean end when either dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax import Engine, SamplingParams, json_grammar, regex_grammar
from sglang_jax.config import Backend, Device, EngineConfig, KVCacheDtype, ModelImpl, SpeculativeAlgorithm
from sglang_jax.errors import ConfigError, EngineDeadError
from sglang_jax.runner.pulse import Pulse

PROMPTS = [[5, 17, 200, 33, 8], [301], [9, 9, 12, 40, 77, 250, 131, 6, 18]]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=12, seed=3, ignore_eos=True)
MASKED = [
    SamplingParams(temperature=0.0, max_new_tokens=20, grammar=json_grammar({"type": "object"})),
    SamplingParams(temperature=1.0, top_k=50, seed=6, max_new_tokens=20, grammar=regex_grammar("([a-z]{2} )+")),
    GREEDY,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", vocab_size=385)


def config(folder: Path, tp_size: int) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder),
        backend=Backend.TORCH,
        device=Device.CPU,
        dtype="float32",
        tp_size=tp_size,
        max_total_tokens=512,
        max_running_requests=4,
        chunked_prefill_size=8,
    )


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The rank numbers in the logs, and how many steps each has launched."""
    noted: list[tuple[int, int]] = []
    monkeypatch.setattr(Pulse, "note_rank", lambda pulse, rank, steps: noted.append((rank, steps)))
    return noted


@pytest.fixture
def engine(folder: Path, beats: list[tuple[int, int]]) -> Iterator[Engine]:
    with Engine(config=config(folder, tp_size=2)) as engine:
        yield engine


def run(engine: Engine, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    outputs = engine.generate(PROMPTS, params)
    assert isinstance(outputs, list)
    return [output.output_ids for output in outputs]


def followers() -> list[psutil.Process]:
    """The second rank of every engine that this process started."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "torch_backend.follower" in child.cmdline()]


def test_two_processes_have_the_output_of_one(folder: Path, engine: Engine, beats: list[tuple[int, int]]) -> None:
    with Engine(config=config(folder, tp_size=1)) as alone:
        expected = [run(alone, GREEDY), run(alone, RANDOM), run(alone, MASKED)]
    assert [run(engine, GREEDY), run(engine, RANDOM), run(engine, MASKED)] == expected
    assert expected[2][2] == expected[0][2] != expected[2][0]
    deadline = time.monotonic() + 20
    while not beats or beats[-1][1] <= GREEDY.max_new_tokens:
        assert time.monotonic() < deadline, beats
        time.sleep(0.05)
    assert {rank for rank, _ in beats} == {1}
    (follower,) = followers()
    engine.shutdown()
    follower.wait(10)


def test_two_processes_count_the_tokens_of_experts_once(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    options = {"enable_expert_distribution_metrics": True, "skip_warmup": True}
    counts = []
    outputs = []
    for tp_size in (1, 2):
        # Whole experts on each of two.
        more = {**options, "enable_expert_parallel": True}
        with Engine(config=config(tmp_path, tp_size).model_copy(update=more)) as engine:
            outputs.append(run(engine, GREEDY))
            counts.append(engine.state()["expert_tokens"])
    assert counts[0] == counts[1]
    assert outputs[0] == outputs[1]
    tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * (GREEDY.max_new_tokens - 1)
    assert [sum(layer) for layer in counts[0].values()] == [3 * tokens] * 2


@pytest.mark.slow
def test_two_processes_with_a_draft_model_have_the_output_of_one_without(
    folder: Path, tmp_path: Path, beats: list[tuple[int, int]]
) -> None:
    draft = make_tiny_checkpoint(tmp_path, "qwen3", vocab_size=385)
    drafting = {
        "speculative_algorithm": SpeculativeAlgorithm.DRAFT,
        "speculative_draft_model_path": str(draft),
        "speculative_num_draft_tokens": 2,
        "max_running_requests": 8,
    }
    with Engine(config=config(folder, tp_size=1)) as alone:
        expected = [run(alone, GREEDY), run(alone, RANDOM)]
    with Engine(config=config(folder, tp_size=2).model_copy(update=drafting)) as engine:
        outputs = [engine.generate(PROMPTS, params) for params in (GREEDY, RANDOM)]
    assert [[output.output_ids for output in found] for found in outputs] == expected
    assert sum(output.drafts.drafts for found in outputs for output in found if output.drafts is not None) > 0


@pytest.mark.slow
def test_two_processes_with_states_have_the_output_of_one(tmp_path: Path) -> None:
    """Prompts that continue from the states of others, and turns of a session."""
    folder = make_tiny_checkpoint(tmp_path, "mamba2", n_groups=1)
    shared = [(7 * number) % 380 + 3 for number in range(37)]
    prompts = [[*shared, 5, 6], [*shared, 9], [301], shared[:21]]
    found = []
    for size in (1, 2):
        sizes = {"page_size": 4, "max_mamba_cache_size": 10}
        with Engine(config=config(folder, size).model_copy(update=sizes)) as engine:
            outputs = [engine.generate(prompts, params) for params in (GREEDY, RANDOM, GREEDY)]
            with engine.open_session() as session:
                outputs.append([session.generate(shared[:number], GREEDY) for number in (5, 9, 3)])
        # the length of a hit depends on which prompts were admitted together
        assert max(out.cached_tokens for out in outputs[2][:2]) >= 32, outputs[2]
        found.append([[out.output_ids for out in each] for each in outputs])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("cache", [pytest.param(KVCacheDtype.AUTO, marks=pytest.mark.soak), KVCacheDtype.INT8])
def test_two_processes_with_a_traced_model_have_the_output_of_one(cache: KVCacheDtype, tmp_path: Path) -> None:
    """A model that is not native; also with int8 keys, whose means all ranks calibrate together."""
    folder = make_tiny_checkpoint(tmp_path, "starcoder2", vocab_size=385)
    found = []
    for size in (1, 2):
        changes = {"model_impl": ModelImpl.TRANSFORMERS, "kv_cache_dtype": cache, "attention_backend": "native"}
        changed = EngineConfig(**config(folder, size).model_dump() | changes)
        with Engine(config=changed) as engine:
            found.append([run(engine, GREEDY), run(engine, RANDOM)])
    assert found[0] == found[1]


def test_a_lost_rank_ends_the_engine_with_an_error(engine: Engine) -> None:
    run(engine, GREEDY)
    (follower,) = followers()
    follower.send_signal(signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        run(engine, GREEDY)


def test_followers_do_not_outlive_rank_0(folder: Path) -> None:
    script = folder / "serve.py"
    script.write_text(
        "import time\n"
        "from sglang_jax import Engine\n"
        "from sglang_jax.config import EngineConfig\n"
        "if __name__ == '__main__':\n"
        f"    engine = Engine(config=EngineConfig(**{config(folder, 2).model_dump(mode='json')!r}))\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert server.stdout is not None
    with server, server.stdout:
        assert server.stdout.readline() == b"ready\n"
        ranks = [
            child
            for child in psutil.Process(server.pid).children(recursive=True)
            if "torch_backend.follower" in child.cmdline()
        ]
        assert len(ranks) == 1
        os.kill(server.pid, signal.SIGKILL)
        psutil.wait_procs(ranks, timeout=10)
        assert not ranks[0].is_running()


def test_heads_that_cannot_be_divided_are_an_error_without_leftover_processes(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="4 heads and 2 kv heads cannot be spread over 3 devices"):
        Engine(config=config(folder, tp_size=3))
    assert "Traceback" not in capfd.readouterr().err
    assert followers() == []
    assert not torch.distributed.is_initialized()


def test_a_process_group_of_the_program_is_kept(folder: Path, tmp_path: Path) -> None:
    meeting_point = f"file://{tmp_path / 'own'}"
    torch.distributed.init_process_group("gloo", init_method=meeting_point, rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="which this process already uses"):
            Engine(config=config(folder, tp_size=2))
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()
    assert followers() == []

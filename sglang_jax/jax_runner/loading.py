"""Creates a runner with its weights on the device: the steps of `runner.assembly` on JAX."""

from __future__ import annotations

import logging
from functools import partial

import jax.numpy as jnp
from jax.sharding import Mesh

from sglang_jax.checkpoint.opening import Checkpoint
from sglang_jax.config import EngineConfig, KVCacheDtype, Warmup
from sglang_jax.errors import ConfigError
from sglang_jax.jax_runner.building import JaxBackend, UnloadedModel
from sglang_jax.jax_runner.compiles import use_compilation_cache
from sglang_jax.jax_runner.kv_scales import LENGTH, ROWS, calibrate_kv_scales, convert_kv_scales
from sglang_jax.jax_runner.model_programs import parameters, programs_of, split_model
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.jax_runner.programs import Programs
from sglang_jax.jax_runner.runner import JaxRunner
from sglang_jax.jax_runner.step import Weights
from sglang_jax.models import Transformer, allocate
from sglang_jax.models.parameters import matrices_as_stored
from sglang_jax.runner.assembly import Assembly, Models, check_room, describe, open_models, open_replacement, settle
from sglang_jax.runner.kv_scales import kv_scale_factor
from sglang_jax.runner.plan import RunnerSpec
from sglang_jax.runner.sizing import refuse_with_latents

logger = logging.getLogger(__name__)


def load_rank(config: EngineConfig, checkpoint: Checkpoint) -> JaxRunner:
    """A runner on the first `config.tp_size` devices of `config.device`. It chooses sizes before it reads weights, and
    builds programs while it reads them. Raises as `create_runner`."""
    use_compilation_cache(config.cache_address())
    models = open_models(config, checkpoint)
    backend = JaxBackend.choose(config, models)
    if backend.platform == "tpu":
        refuse_with_latents(config, checkpoint.config)
    assembly: Assembly[UnloadedModel] = settle(config, models, backend)
    kv_factor = kv_scale_factor(checkpoint, config.kv_cache_dtype)
    main, draft, spec, mesh = assembly.model, assembly.draft, assembly.spec, backend.mesh
    cache = backend.cache(main, assembly.pages, count_experts=config.enable_expert_distribution_metrics)
    own_cache = None if draft is None else backend.cache(draft, assembly.draft_pages)
    drafting = None if draft is None or own_cache is None else (draft.build(), draft.parallel, own_cache)
    programs = programs_of(main.build(), main.parallel, cache, spec, config, mesh, drafting)
    try:
        _begin_building(programs, config, spec)
        as_stored = matrices_as_stored(main.model)
        main.load(mesh)
        _fit_kv_scales(config, main.model, kv_factor, main.parallel, mesh, backend.dtype)
        _, weights = split_model(main.model)
        num_weights = len(weights)
        kv = allocate(cache, mesh)
        if draft is not None and own_cache is not None:
            draft.load(mesh)
            weights, kv = [*weights, *split_model(draft.model)[1]], (*kv, *allocate(own_cache, mesh))
    except BaseException:
        programs.abandon()
        raise
    details = {
        "dtype": backend.dtype.name,
        "kv_cache_dtype": backend.kv_dtype.name,
        "attention": backend.attention_of(main),
        "compilation_cache": config.cache_address(),
        **describe(config, models, as_stored),
    }
    reload = partial(_reload, config, models, backend, main)
    counted = tuple(number for number, experts in enumerate(cache.counted) if experts)
    return JaxRunner(programs, weights, kv, spec, details, mesh, counted, reload, num_weights)


def _reload(
    config: EngineConfig, models: Models, backend: JaxBackend, served: UnloadedModel, model_path: str | None
) -> Weights:
    """Loads weights that may replace those of `served`, in the same order. Raises as `Runner.load_weights`."""
    replacement = open_replacement(config, models, model_path)
    kv_factor = kv_scale_factor(replacement.main, config.kv_cache_dtype)
    unloaded = backend.build(replacement)
    check_room(backend, unloaded)
    ours, theirs = (
        [(parameter.shape, parameter.dtype) for parameter in parameters(each.build())] for each in (served, unloaded)
    )
    if ours != theirs:
        raise ConfigError(f"{model_path} stores its weights in another way than the model served: see quantization")
    unloaded.load(backend.mesh)
    _fit_kv_scales(config, unloaded.model, kv_factor, unloaded.parallel, backend.mesh, backend.dtype)
    return split_model(unloaded.model)[1]


def _begin_building(programs: Programs, config: EngineConfig, spec: RunnerSpec) -> None:
    """Starts to build programs while weights are read: those of the warm-up or, without one, those of a one-row
    runner's first answer. With more rows, the first programs depend on the requests."""
    if not config.skip_warmup:
        first_only = config.warmup is Warmup.FIRST and config.nnodes == 1
        programs.begin(programs.needed_first() if first_only else programs.builders())
    elif spec.max_rows == 1:
        programs.begin(programs.of_short_answers())


def _fit_kv_scales(
    config: EngineConfig,
    model: Transformer,
    factor: float | None,
    parallel: TensorParallel,
    mesh: Mesh,
    dtype: jnp.dtype,
) -> None:
    """Sets the scales of an 8-bit cache: the checkpoint's, times `factor`. Without these, float8 has scales of 1, and
    int8, whose steps are uniform, is calibrated; latent vectors have a scale for each token."""
    if factor is not None:
        convert_kv_scales(model, factor)
    if factor is not None or config.kv_cache_dtype is not KVCacheDtype.INT8 or not parallel.config.kv_attention:
        return
    calibrate_kv_scales(model, parallel, mesh, dtype=dtype, page_size=config.page_size)
    logger.info(
        "Keys and values are stored in int8 with scales calibrated on %d tokens: the checkpoint has none",
        ROWS * LENGTH,
    )

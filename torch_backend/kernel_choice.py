"""Chooses the implementations of attention, recurrent states, fused operations and sampling for a device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang_jax.config import AttentionBackend
from sglang_jax.errors import ConfigError, how_to_install
from torch_backend.attention.fixed import BlockAttention, ChunksOnly
from torch_backend.attention.interface import AttentionImplementation
from torch_backend.attention.native import NativeAttention
from torch_backend.attention.reference import ReferenceAttention
from torch_backend.cpu_trial import (
    CpuForm,
    CpuKernelsError,
    make_bfloat16_products,
    make_block_matrices,
    make_cpu_kernels,
    make_threads,
)
from torch_backend.layers.bfloat16 import Bfloat16Products
from torch_backend.layers.blocks import BlockMatrices
from torch_backend.native_operations import EvenOperations, NativeOperations
from torch_backend.native_sampler import NativeSampler
from torch_backend.operations import Operations
from torch_backend.recurrent.interface import StateImplementation
from torch_backend.recurrent.native import NativeStates
from torch_backend.sampler import TokenSampler

if TYPE_CHECKING:
    from torch_backend.cpu_kernels.threads import OwnThreads

logger = logging.getLogger(__name__)

# `auto` is the first.
_ATTENTION_ON_CPU = (
    AttentionBackend.NUMBA,
    AttentionBackend.NATIVE,
    AttentionBackend.REFERENCE,
    AttentionBackend.SAGE,
)
_ATTENTION_ON_GPU = (
    AttentionBackend.TRITON,
    AttentionBackend.NATIVE,
    AttentionBackend.REFERENCE,
    AttentionBackend.SAGE,
    AttentionBackend.FLASHINFER,
)
_OF_TRITON = (AttentionBackend.TRITON, AttentionBackend.SAGE)
"""Triton kernels. They depend on the dtype of keys: `sage` names the same kernels with int8 keys."""


_NOT_FIXED = (AttentionBackend.REFERENCE, AttentionBackend.FLASHINFER)
"""Attention whose sums may depend on other sequences or on chunks."""

_MAX_NAMED = 6


@dataclass(frozen=True, slots=True)
class Kernels:
    """The implementations that a device runs."""

    attention: AttentionImplementation
    attention_name: AttentionBackend
    operations: Operations
    sampler: TokenSampler
    block_matrices: BlockMatrices | None = None
    """Products with matrices in a checkpoint's GGUF blocks; None if not supported."""
    states: StateImplementation = field(default_factory=NativeStates)
    threads: OwnThreads | None = None
    """Threads of kernels on a CPU; None if they use those of torch's operations."""
    bfloat16: Bfloat16Products | None = None
    """Products with matrices that stay in bfloat16, in a model of float32; None if none should or can."""

    @property
    def capturable(self) -> bool:
        """Whether a step reads nothing on the host; attention without Triton reads its lengths there."""
        if self.attention_name is AttentionBackend.SAGE:
            return not isinstance(self.attention, NativeAttention | BlockAttention)
        return self.attention_name is AttentionBackend.TRITON


def choose_kernels(
    wanted: AttentionBackend,
    device: torch.device,
    form: CpuForm,
    cache_folder: Path,
    *,
    latents: bool = False,
    fixed: bool = False,
) -> Kernels:
    """Chooses Triton kernels on a GPU, and on a CPU compiled kernels for a model of `form`, cached in `cache_folder`,
    or torch operations. `wanted`: the attention backend. `auto` falls back to torch operations, with a log line, on a
    CPU without compiled kernels, and for a model with latent attention (`latents`) on a GPU with `fixed`. `fixed`: a
    token's results must not depend on the other tokens of a step. Raises `ConfigError` for an attention backend that
    the device or the model does not support."""
    known = _ATTENTION_ON_CPU if device.type == "cpu" else _ATTENTION_ON_GPU
    name = known[0] if wanted is AttentionBackend.AUTO else wanted
    if name not in known:
        raise ConfigError(
            f"attention_backend {name.value} is not available in the torch backend on {device.type}: "
            f"choose {' or '.join(each.value for each in known)}, or auto"
        )
    if latents:
        name = _for_latents(wanted, device, fixed=fixed)
    if fixed and name in _NOT_FIXED:
        raise ConfigError(
            f"attention_backend {name.value} may depend on the batch, and was asked not to: "
            f"choose {known[0].value}, or auto"
        )
    if device.type == "cpu":
        return _on_cpu(name, wanted, form, cache_folder, fixed=fixed)
    # Imported here, because a machine without a GPU needs no Triton.
    from torch_backend.attention.triton import TritonAttention
    from torch_backend.kernels.chip import Chip
    from torch_backend.kernels.operations import TritonOperations
    from torch_backend.kernels.sample import TritonSampler
    from torch_backend.recurrent.triton import TritonStates

    chip = Chip.of(device)
    operations, sampler = TritonOperations(chip.dependent_launches), TritonSampler()
    states = NativeStates(fixed=True) if fixed else TritonStates()
    if name is AttentionBackend.FLASHINFER:
        return Kernels(_flashinfer(device, form), name, operations, sampler, states=states)
    if name not in _OF_TRITON:
        return Kernels(
            _attention_without_kernels(name, fixed=fixed), name, operations, sampler, states=NativeStates(fixed=fixed)
        )
    attention = TritonAttention(chip)
    computed = ChunksOnly(attention) if fixed else attention
    return Kernels(computed, name, operations, sampler, states=states)


def _for_latents(wanted: AttentionBackend, device: torch.device, *, fixed: bool) -> AttentionBackend:
    """The attention of a model with latent attention. Raises `ConfigError` for one that does not support it."""
    supported = [AttentionBackend.NATIVE, AttentionBackend.REFERENCE]
    if device.type == "cpu":
        supported = [AttentionBackend.NUMBA, *supported]
    elif not fixed:
        supported = [AttentionBackend.TRITON, *supported]
    elif wanted is AttentionBackend.AUTO:
        logger.info("Latent attention is computed by torch operations: its kernel depends on the batch")
    if wanted is AttentionBackend.AUTO:
        return supported[0]
    if wanted not in supported:
        in_this_mode = ", where results must not depend on the batch" if fixed and device.type != "cpu" else ""
        raise ConfigError(
            f"attention_backend {wanted.value} does not support latent attention on {device.type}{in_this_mode}: "
            f"choose {supported[0].value}, or auto"
        )
    return wanted


def refuse_sinks(name: AttentionBackend, layers: Sequence[int]) -> None:
    """Raises `ConfigError` if `layers` have attention sinks, and the attention backend does not support them."""
    if name is AttentionBackend.FLASHINFER and layers:
        named = ", ".join(map(str, layers[:_MAX_NAMED])) + (" and others" if len(layers) > _MAX_NAMED else "")
        raise ConfigError(
            f"attention_backend flashinfer does not support attention sinks, which layers {named} have: choose triton"
        )


def _on_cpu(
    name: AttentionBackend, wanted: AttentionBackend, form: CpuForm, cache_folder: Path, *, fixed: bool
) -> Kernels:
    states = NativeStates(fixed=fixed)
    threads = make_threads(form, cache_folder) if name is AttentionBackend.NUMBA else None
    matrices = make_block_matrices(form, cache_folder, threads)
    products = make_bfloat16_products(form, cache_folder, threads)
    if name is AttentionBackend.NUMBA:
        try:
            if fixed and form.kv_dtype is torch.int8:
                raise CpuKernelsError("with equal results, they do not support keys and values in int8")
            compiled = make_cpu_kernels(form, cache_folder, threads)
        except CpuKernelsError as error:
            if wanted is AttentionBackend.NUMBA:
                raise ConfigError(f"attention_backend numba has no kernels: {error}") from error
            logger.info("Torch operations instead of CPU kernels: %s", error)
            name = AttentionBackend.NATIVE
        else:
            attention = compiled.fixed_attention if fixed else compiled.attention
            return Kernels(attention, name, compiled.operations, NativeSampler(), matrices, states, threads, products)
    operations = EvenOperations() if fixed else NativeOperations()
    attention = _attention_without_kernels(name, fixed=fixed)
    return Kernels(attention, name, operations, NativeSampler(), matrices, states, threads, products)


def _flashinfer(device: torch.device, form: CpuForm) -> AttentionImplementation:
    from torch_backend.attention.flashinfer import FlashInferAttention, check_form

    check_form(form.dtype, form.kv_dtype, form.heads)
    if find_spec("flashinfer") is None:
        raise ConfigError(f"attention_backend flashinfer: flashinfer is not installed: {how_to_install('flashinfer')}")
    return FlashInferAttention(import_module("flashinfer"), device)


def _attention_without_kernels(name: AttentionBackend, *, fixed: bool) -> AttentionImplementation:
    if fixed:
        return BlockAttention()
    return ReferenceAttention() if name is AttentionBackend.REFERENCE else NativeAttention()

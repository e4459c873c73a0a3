"""Data parallelism: replicated (DDP) or sharded (FSDP2). Both save and load the same checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from inline_attention.engine.processes import Processes

StateDict = dict[str, Any]


class Replicated:
    """Every device has the whole model; with several ranks, PyTorch's DDP."""

    def __init__(self, processes: Processes):
        self._processes = processes

    def prepare(self, model: nn.Module) -> None:
        """Change the model in place, before its optimizer is created."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module for forward passes."""
        if self._processes.world_size == 1:
            return model
        device = self._processes.device
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    def without_exchange(self, runnable: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for backward passes without gradient exchange."""
        return runnable.no_sync() if isinstance(runnable, DistributedDataParallel) else nullcontext()

    def gathered(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which ranks run the model without waiting for each other. All must enter it."""
        del model
        return nullcontext()

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return whole weights on rank 0. All ranks must call it."""
        return model.state_dict()

    def load_weights(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Load whole weights."""
        model.load_state_dict(weights)

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
        """Return the whole state, by parameter names, on rank 0. All ranks must call it."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        numbered = optimizer.state_dict()
        return {
            "state": {order[number]: state for number, state in numbered["state"].items()},
            "param_groups": [
                {**group, "params": [order[number] for number in group["params"]]} for group in numbered["param_groups"]
            ],
        }

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load the whole state."""
        del model
        optimizer.load_state_dict(state)  # by the order of parameters


class Sharded(Replicated):
    """Parameters, gradients and optimizer states are sharded: PyTorch's FSDP2, block by block."""

    _gathering = StateDictOptions(full_state_dict=True, cpu_offload=True)
    _loading = StateDictOptions(full_state_dict=True)

    def prepare(self, model: nn.Module) -> None:
        """Shard every block, then the rest."""
        for module in list(model.modules()):
            if module is not model and type(module).__name__.endswith("Block"):
                fully_shard(module)
        fully_shard(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself, which gathers one block at a time."""
        return model

    @contextmanager
    def without_exchange(self, runnable: nn.Module) -> Iterator[None]:
        """Keep whole gradients until they are exchanged."""
        module = cast(FSDPModule, runnable)
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Every device has all parameters meanwhile, which takes little memory compared to training.

        One rank may have one batch more to evaluate than another, and must not wait for it.
        """
        parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in parts:
                # FSDP2's default: the backward pass needs the parameters outside of blocks at once.
                part.set_reshard_after_forward(part is not model, recurse=False)
                part.reshard()

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Gather whole weights on rank 0."""
        return cast(dict[str, Tensor], get_model_state_dict(model, options=self._gathering))

    def load_weights(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Load the shard of each device."""
        set_model_state_dict(model, cast(Any, weights), options=self._loading)

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
        """Gather the whole state on rank 0."""
        return cast(StateDict, get_optimizer_state_dict(model, optimizer, options=self._gathering))

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load the shard of each device."""
        set_optimizer_state_dict(model, optimizer, state, options=self._loading)

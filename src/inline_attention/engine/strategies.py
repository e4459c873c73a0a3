"""Data parallelism: replicated (DDP) or sharded (FSDP2). Both save and load the same checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, cast

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


class Strategy(Protocol):
    """The interface of both strategies."""

    def prepare(self, model: nn.Module) -> None:
        """Change the model in place, before its optimizer is created."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module for forward passes."""
        ...

    def without_exchange(self, runnable: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for backward passes without gradient exchange."""
        ...

    def gathered(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which ranks run the model without waiting for each other. All must enter it."""
        ...

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return whole weights on rank 0. All ranks must call it."""
        ...

    def load_weights(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Load whole weights."""

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
        """Return the whole state, by parameter names, on rank 0. All ranks must call it."""
        ...

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load the state."""


class Replicated:
    """Every device has the whole model; with several ranks, PyTorch's DDP."""

    def __init__(self, processes: Processes):
        self._processes = processes

    def prepare(self, model: nn.Module) -> None:
        """Nothing to do."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, or DDP around it."""
        if self._processes.world_size == 1:
            return model
        device = self._processes.device
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    def without_exchange(self, runnable: nn.Module) -> AbstractContextManager[Any]:
        """DDP's `no_sync`."""
        return runnable.no_sync() if isinstance(runnable, DistributedDataParallel) else nullcontext()

    def gathered(self, model: nn.Module) -> AbstractContextManager[Any]:
        """The model is whole everywhere."""
        del model
        return nullcontext()

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state dict."""
        return model.state_dict()

    def load_weights(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Load them."""
        model.load_state_dict(weights)

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
        """Return the state dict with parameter names instead of numbers, as the sharded one has."""
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
        """Load the state by the order of parameters."""
        del model
        optimizer.load_state_dict(state)


class Sharded:
    """Parameters, gradients and optimizer states are sharded: PyTorch's FSDP2, block by block."""

    def prepare(self, model: nn.Module) -> None:
        """Shard every block, then the rest."""
        for module in list(model.modules()):
            if module is not model and type(module).__name__.endswith("Block"):
                fully_shard(module)
        fully_shard(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself, which gathers one block at a time."""
        return model

    def without_exchange(self, runnable: nn.Module) -> AbstractContextManager[Any]:
        """Keep whole gradients until they are exchanged."""
        return _WithoutSync(runnable) if isinstance(runnable, FSDPModule) else nullcontext()

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
                # FSDP2's default: what belongs to no block is needed again at once, by the backward pass.
                part.set_reshard_after_forward(part is not model, recurse=False)
                part.reshard()

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Gathered from all devices."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return cast(dict[str, Tensor], get_model_state_dict(model, options=options))

    def load_weights(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Load the shard of each device."""
        set_model_state_dict(model, cast(Any, weights), options=StateDictOptions(full_state_dict=True))

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
        """Gathered from all devices."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return cast(StateDict, get_optimizer_state_dict(model, optimizer, options=options))

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load the shard of each device."""
        set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


class _WithoutSync:
    def __init__(self, module: FSDPModule):
        self._module = module

    def __enter__(self) -> None:
        self._module.set_requires_gradient_sync(False)

    def __exit__(self, *_: object) -> None:
        self._module.set_requires_gradient_sync(True)

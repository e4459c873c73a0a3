"""How several devices share a model: each has all of it, or a part. Both save and load the same checkpoints."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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
    """What the training loop asks of either."""

    def prepare(self, model: nn.Module) -> None:
        """Change the model in place, before its optimiser is made."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """What to call in forward passes."""
        ...

    def without_exchange(self, runnable: nn.Module) -> AbstractContextManager[Any]:
        """A context for backward passes whose gradients need not be exchanged yet."""
        ...

    def capture(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], StateDict]:
        """Whole weights, and optimiser state by names of parameters; all processes take part, the main one gets it."""
        ...

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Tensor], state: StateDict
    ) -> None:
        """Take them up again."""


class Replicated:
    """Every device has the whole model; with several processes, PyTorch's DDP."""

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

    def capture(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], StateDict]:
        """Their state dicts; the optimiser's names parameters instead of numbering them, as the sharded one's does."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        numbered = optimizer.state_dict()
        return model.state_dict(), {
            "state": {order[number]: state for number, state in numbered["state"].items()},
            "param_groups": [
                {**group, "params": [order[number] for number in group["params"]]} for group in numbered["param_groups"]
            ],
        }

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Tensor], state: StateDict
    ) -> None:
        """Load them; an optimiser goes by the order of parameters, whatever they are called."""
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)


class Sharded:
    """Parameters, gradients and optimiser states divided among the devices: PyTorch's FSDP2, block by block."""

    def prepare(self, model: nn.Module) -> None:
        """Divide every block, then what is left."""
        for module in list(model.modules()):
            if module is not model and type(module).__name__.endswith("Block"):
                fully_shard(module)
        fully_shard(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself, which gathers its blocks as it goes."""
        return model

    def without_exchange(self, runnable: nn.Module) -> AbstractContextManager[Any]:
        """Keep whole gradients until they are wanted."""
        return _Unsynchronised(runnable) if isinstance(runnable, FSDPModule) else nullcontext()

    def capture(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], StateDict]:
        """Gathered from all devices."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = cast(dict[str, Tensor], get_model_state_dict(model, options=options))
        return weights, cast(StateDict, get_optimizer_state_dict(model, optimizer, options=options))

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Tensor], state: StateDict
    ) -> None:
        """Each device takes its part."""
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, cast(Any, weights), options=options)
        set_optimizer_state_dict(model, optimizer, state, options=options)


class _Unsynchronised:
    def __init__(self, module: FSDPModule):
        self._module = module

    def __enter__(self) -> None:
        self._module.set_requires_gradient_sync(False)

    def __exit__(self, *_: object) -> None:
        self._module.set_requires_gradient_sync(True)

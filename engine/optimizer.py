"""How the weights are updated: parameter groups, AdamW, Muon and the learning-rate schedule.

Knows parameters and settings; nothing of data, checkpoints or devices.
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from config.schema import TrainSettings
from engine.sharding import on_whole_matrices, shared_like
from model import GPT

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024, "Muon"
NEWTON_SCHULZ_STEPS = 5
MUON_MOMENTUM = 0.95


def learning_rate_at(step: int, settings: TrainSettings) -> float:
    """The learning rate of one update: linear warm-up, then decay to min_lr, a function of the step alone.

    Update 0 already moves (a rate of zero would waste it), and update `warmup_iters` is the first with the
    full rate.

    Args:
        step: updates done before this one.
        settings: learning_rate, min_lr, warmup_iters, lr_decay_iters (0 = max_iters), lr_decay.
    """
    if step < settings.warmup_iters:
        return settings.learning_rate * (step + 1) / (settings.warmup_iters + 1)
    decay_iters = settings.lr_decay_iters or settings.max_iters
    if settings.lr_decay == "constant":
        return settings.learning_rate
    progress = min(1.0, (step - settings.warmup_iters) / max(1, decay_iters - settings.warmup_iters))
    remaining = 1.0 - progress if settings.lr_decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.min_lr + remaining * (settings.learning_rate - settings.min_lr)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace each matrix by (nearly) its closest orthogonal one, all of a shape at once.

    Five Newton-Schulz iterations in bfloat16, over the short side, push every singular value to about 0.7 to 1.2.

    Args:
        matrices: (N, rows, columns).

    Returns:
        Same shape, bfloat16.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).bfloat16()  # (N, short side, long side)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT  # (N, short side, short side)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with the matrices of one shape orthogonalized together.

    Momentum, Nesterov, decoupled decay and `match_rms_adamw` scaling are the same, so that learning rate
    and weight decay are those of AdamW; only the many small matrix products become a few large ones. Where several
    processes have a share of every matrix, each of them orthogonalizes some of the matrices.

    Args:
        params: matrices.
        lr: learning rate, on AdamW's scale.
        weight_decay: decoupled.

    Raises:
        ValueError: a parameter is not a matrix.

    Source: Jordan et al. 2024; scaling from Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        if any(parameter.dim() != 2 for group in self.param_groups for parameter in group["params"]):
            raise ValueError("Muon updates matrices only")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._update_together(parameters, group["lr"], group["weight_decay"])

    def _update_together(self, parameters: list[Tensor], lr: float, weight_decay: float) -> None:
        directions = []
        for parameter in parameters:
            assert parameter.grad is not None  # step() chose those that have one
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            state["momentum_buffer"].lerp_(parameter.grad, 1 - MUON_MOMENTUM)
            directions.append(parameter.grad.lerp(state["momentum_buffer"], MUON_MOMENTUM))  # Nesterov
        updates = on_whole_matrices(orthogonalize, torch.stack(directions))  # (N, rows, columns)
        rate = 0.2 * math.sqrt(max(parameters[0].shape)) * lr
        for parameter, update in zip(parameters, updates.to(parameters[0].dtype).unbind(), strict=True):
            parameter.mul_(1 - lr * weight_decay)
            parameter.add_(update, alpha=-rate)


class Optimizer:
    """All the optimizers of one model as one: a loss scaler then takes or skips an update as a whole.

    Args:
        parts: over disjoint parameters.
    """

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    def set_learning_rate(self, learning_rate: float) -> None:
        """The rate of the next update."""
        for group in self.param_groups:
            group["lr"] = learning_rate

    def step(self) -> None:
        """Update the weights."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """Each part's state."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[Mapping[str, Any]]) -> None:
        """Take back the state that `state_dict` gave; decay, betas and rate stay as they are set now.

        Raises:
            ValueError: the states belong to other parameters.
        """
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        for part, state in zip(self.parts, states, strict=True):
            parameters = [parameter for group in part.param_groups for parameter in group["params"]]
            part.load_state_dict(
                {
                    **state,
                    "state": {
                        index: {name: shared_like(parameters[index], value) for name, value in values.items()}
                        for index, values in state["state"].items()
                    },
                }
            )
            names = {"momentum_buffer"} if isinstance(part, Muon) else {"step", "exp_avg", "exp_avg_sq"}
            for parameter, values in part.state.items():
                # The fused kernels do not look, and would read beyond the end of a smaller tensor.
                shapes = {name: getattr(value, "shape", None) for name, value in values.items()}
                if shapes != {name: torch.Size() if name == "step" else parameter.shape for name in names}:
                    raise ValueError(f"{shapes} for a parameter of shape {tuple(parameter.shape)}")
        for group, values in zip(self.param_groups, settings, strict=True):
            group.update(values)


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW itself, called without what is wrapped around it for compiled code.

    Those wrappers import PyTorch's whole compiler at the first step, which doubles the time that a run takes to start.

    Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        inspect.unwrap(torch.optim.AdamW.step)(self)


def start_without_compiler() -> None:
    """Spare the import of PyTorch's compiler in what `AdamW` does not override.

    These methods ask the compiler, when first called, for a form of themselves that compiled code leaves alone, and
    remember it in this attribute; nobody compiles an optimizer here, so that form is the method itself.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        plain = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        plain.__dynamo_disable = plain


def make_optimizer(model: GPT, settings: TrainSettings) -> Optimizer:
    """AdamW for everything, or Muon for the blocks' matrices and AdamW for the rest.

    Weight decay acts on matrices only: biases and norms have nothing to gain from being pulled to zero.

    Source of the grouping: nanoGPT.
    """
    start_without_compiler()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    parts: list[torch.optim.Optimizer] = []
    if settings.optimizer == "muon":
        in_blocks = {id(parameter) for parameter in model.blocks.parameters()}
        hidden = [parameter for parameter in matrices if id(parameter) in in_blocks]
        matrices = [parameter for parameter in matrices if id(parameter) not in in_blocks]
        parts.append(Muon(hidden, lr=settings.learning_rate, weight_decay=settings.weight_decay))
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adamw = AdamW(
        groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), fused=True
    )  # every device of ours has the fused form
    return Optimizer([*parts, adamw])

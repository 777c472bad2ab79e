"""An optimizer that uses Muon for hidden matrices and Adam for all other parameters.

Its state is a plain dictionary of tensors. Matrices of one shape are orthogonalised as one batch.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

_NS = (3.4445, -4.7750, 2.0315)


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """Orthogonalise matrices (n, rows, columns), rows <= columns, by Newton-Schulz iterations."""
    x = stack.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _NS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.to(stack.dtype)


class Muon:
    """The optimizer; `step` applies the gradients of those of the model's parameters that require them."""

    def __init__(
        self,
        model: nn.Module,
        *,
        momentum: float,
        betas: tuple[float, float],
        decay: float,
        matrices: tuple[str, ...] = (".blocks.", ".layers.", "merger"),
    ) -> None:
        """Divide the parameters. matrices: parts of the names of the matrices that Muon is for."""
        self.momentum, self.betas, self.decay = momentum, betas, decay
        self.steps = 0
        hidden, others = [], []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            is_hidden = parameter.ndim == 2 and any(part in name for part in matrices)
            (hidden if is_hidden else others).append(parameter)
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for parameter in hidden:
            self.groups[tuple(sorted(parameter.shape))].append(parameter)
        self.matrices, self.others = hidden, others
        self.buffers = [torch.zeros_like(p) for p in hidden]
        self.first = [torch.zeros_like(p) for p in others]
        self.second = [torch.zeros_like(p) for p in others]
        self.index = {id(p): i for i, p in enumerate(hidden)}

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps, "buffers": self.buffers, "first": self.first, "second": self.second}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.steps = state["steps"]
        for name in ("buffers", "first", "second"):
            for mine, theirs in zip(getattr(self, name), state[name], strict=False):
                mine.copy_(theirs)

    @torch.no_grad()
    def step(self, rate: float, adam_rate: float) -> None:
        self.steps += 1
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.matrices]
        torch._foreach_lerp_(self.buffers, gradients, 1 - self.momentum)
        for (small, large), parameters in self.groups.items():
            where = [self.index[id(p)] for p in parameters]
            ahead = [torch.lerp(gradients[i], self.buffers[i], self.momentum) for i in where]
            stack = torch.stack([u if u.shape[0] <= u.shape[1] else u.mT for u in ahead])
            updates = orthogonalise(stack).unbind(0)
            scale = 0.2 * max(small, large) ** 0.5 * rate
            for parameter, update in zip(parameters, updates, strict=True):
                update = update if parameter.shape[0] <= parameter.shape[1] else update.mT
                parameter.mul_(1 - rate * self.decay).sub_(update, alpha=scale)
        self._adam(adam_rate)

    def _adam(self, rate: float) -> None:
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.others]
        beta1, beta2 = self.betas
        torch._foreach_lerp_(self.first, gradients, 1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - beta2)
        size = rate * (1 - beta2**self.steps) ** 0.5 / (1 - beta1**self.steps)
        denominators = torch._foreach_sqrt(self.second)
        torch._foreach_add_(denominators, 1e-9)
        torch._foreach_addcdiv_(self.others, self.first, denominators, -size)

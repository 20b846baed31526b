"""Optimizers beyond torch's own: Muon for matrices with AdamW for the rest, as one object.

Muon (momentum, orthogonalised by Newton-Schulz) learns a drafter's matrices in fewer steps. Norms are
vectors, for which it is not defined, and a table has rows that are looked up one by one, which it would move
all together: a drafter marks those with `is_table`. With `match_rms_adamw` its updates have the size of
AdamW's, so one rate serves both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from torch import nn

from trainer.errors import UserError, first_line
from trainer.ranges import AtLeast, Below, NotNegative

Decay = Annotated[float, AtLeast(0), Below(1)]  # of a running average


class MuonAdamW(torch.optim.Optimizer):
    """`lr` for matrices (2-D parameters that are no tables), `vector_lr` for everything else."""

    def __init__(self, params: Iterable[nn.Parameter], lr: NotNegative, momentum: Decay,
                 weight_decay: NotNegative, vector_lr: NotNegative, betas: tuple[Decay, Decay],
                 eps: NotNegative) -> None:
        given = list(params)
        matrices = [each for each in given if each.ndim == 2 and not getattr(each, "is_table", False)]
        chosen = {id(each) for each in matrices}
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=lr, momentum=momentum, weight_decay=weight_decay,
                             adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([each for each in given if id(each) not in chosen], lr=vector_lr,
                              betas=tuple(betas), eps=eps, weight_decay=0.0))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """State by one running index over the parts, as a single optimizer would number it."""
        state: dict[int, Any] = {}
        start = 0
        for part in self.parts:
            state |= {start + index: entry for index, entry in part.state_dict()["state"].items()}
            start += sum(len(group["params"]) for group in part.param_groups)
        return {"state": state, "param_groups": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        start = 0
        for part in self.parts:
            count = sum(len(group["params"]) for group in part.param_groups)
            own = {index - start: entry for index, entry in state_dict["state"].items()
                   if start <= index < start + count}
            part.load_state_dict({"state": own, "param_groups": part.state_dict()["param_groups"]})
            start += count


def require_step(make: Callable[..., torch.optim.Optimizer], device: str, clip: float) -> None:
    """Raises unless an optimizer with its settings can be made and takes a step on `device` that moves
    something, the gradient clipped to `clip`: some settings are refused only there."""
    parameters = [nn.Parameter(torch.zeros(shape, device=device)) for shape in ((2, 2), (2,))]
    for each in parameters:
        each.grad = torch.ones_like(each)
    settings = getattr(make, "keywords", {})
    try:
        optimizer = make(params=parameters)
        nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    except (ValueError, TypeError, AssertionError, RuntimeError, NotImplementedError) as error:
        words = re.findall(r"\w+", str(error))
        named = [f"optimizer.{name}" for name in settings if name in words] \
            or [f"optimizer.{name}={value}" for name, value in settings.items()]
        raise UserError(f"the optimizer cannot take a step on {device} with its settings "
                        f"({first_line(error)}); mend {' or '.join(named)}") from error
    if not any(each.any() for each in parameters):
        raise UserError(f"a step of the optimizer moves nothing with optimizer.lr={settings.get('lr')} and "
                        f"train.clip={clip}, so nothing would be trained; raise the one that is so small")


def require_parts(make: Callable[..., torch.optim.Optimizer], device: str) -> None:
    """Raises unless a step on two halves of a matrix is the step on the whole of it: what a strategy that
    spreads the moments over processes takes for granted."""
    start = torch.tensor([[1.0, -2.0], [0.5, 3.0]], device=device)
    gradient = 0.1 * start

    def stepped(parts: int) -> torch.Tensor:
        """The matrix after a step; the vector behind it is there because some optimizers take no less."""
        parameters = [nn.Parameter(part.clone()) for part in (*start.chunk(parts), start[0])]
        for each, part in zip(parameters, (*gradient.chunk(parts), gradient[0]), strict=True):
            each.grad = part.clone()
        make(params=parameters).step()
        return torch.cat([each.detach() for each in parameters[:parts]])

    if not torch.allclose(stepped(1), stepped(2), rtol=1e-5):  # kernels may round a tail otherwise
        kind = getattr(getattr(make, "func", make), "__name__", "this one")
        raise UserError(f"the optimizer ({kind}) needs whole matrices, which this strategy spreads over "
                        "processes: a step on two halves is not the step on the whole; set strategy=ddp, or "
                        "optimizer=adamw")

"""Every optimizer of conf/optimizer learns, and goes on bit for bit from a checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from hydra.utils import instantiate
from torch import nn

from trainer.errors import UserError
from trainer.strategies.process import Group
from trainer.strategies.single import Alone
from trainer.training import checkpoint
from trainer.training.optimizers import MuonAdamW, require_parts

OPTIMIZERS = sorted((Path(__file__).parents[2] / "conf/optimizer").glob("*.yaml"))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Losses of steps that depend on their number alone."""
    losses = []
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(32, 8, generator=generator)
        loss = (module(inputs) - inputs[:, :4].sin()).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("path", OPTIMIZERS, ids=lambda path: path.stem)
def test_it_learns_and_resumes_to_the_bit(path: Path, tmp_path: Path) -> None:
    make = instantiate(yaml.safe_load(path.read_text()) | {"lr": 0.01}, _convert_="all")
    whole = model()
    optimizer = make(whole.parameters())
    losses = steps(whole, optimizer, 0, 40)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])

    first = model()
    optimizer = make(first.parameters())
    steps(first, optimizer, 0, 17)
    moments = Alone(first, optimizer, Group(0, 1, "cpu")).moments()
    saved = checkpoint.save(tmp_path, 17, first, moments, {}, keep=1)
    again = model()
    optimizer = make(again.parameters())
    assert checkpoint.load(saved, again)["step"] == 17
    Alone(again, optimizer, Group(0, 1, "cpu")).load_moments(checkpoint.load_moments(saved))
    assert steps(again, optimizer, 17, 40) == losses[17:]
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_muon_takes_the_matrices_alone() -> None:
    node = yaml.safe_load((Path(__file__).parents[2] / "conf/optimizer/muon.yaml").read_text())
    parts = instantiate(node)(model().parameters()).parts
    shapes = [{parameter.ndim for group in part.param_groups for parameter in group["params"]}
              for part in parts]
    assert shapes == [{2}, {1}]


def test_muon_leaves_vectors_and_tables_to_adamw() -> None:
    """A row of a table that was not looked up stays where it is."""
    table, matrix = nn.Embedding(6, 4), nn.Linear(4, 4)
    table.weight.is_table = True
    before = table.weight.detach().clone()
    optimizer = MuonAdamW([*table.parameters(), *matrix.parameters()], lr=0.1, momentum=0.9, weight_decay=0.0,
                          vector_lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    muon, adamw = ([id(each) for group in part.param_groups for each in group["params"]]
                   for part in optimizer.parts)
    assert muon == [id(matrix.weight)] and set(adamw) == {id(table.weight), id(matrix.bias)}
    matrix(table(torch.tensor([1, 4]))).pow(2).sum().backward()
    optimizer.step()
    moved = (table.weight.detach() != before).any(dim=1)
    assert moved.tolist() == [False, True, False, False, True, False]


def test_an_optimizer_that_needs_whole_matrices_is_found_by_what_it_does() -> None:
    nodes = {path.stem: instantiate(yaml.safe_load(path.read_text()), _convert_="all") for path in OPTIMIZERS}
    require_parts(nodes["adamw"], "cpu")
    require_parts(partial(torch.optim.SGD, lr=0.1, momentum=0.9), "cpu")
    with pytest.raises(UserError, match=r"optimizer \(MuonAdamW\) needs whole matrices.*set strategy=ddp"):
        require_parts(nodes["muon"], "cpu")

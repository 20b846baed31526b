"""A head that scores a part of the vocabulary: clusters of tokens are chosen by their centroids, and only the
tokens of the best clusters have logits.

A choice has no gradient, so the centroids learn by a loss of their own: the cross-entropy of the cluster that
the token lies in. Which tokens lie together is decided once, before training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROUNDS = 8  # of the power iteration: a rough direction will do


class CentroidHead(nn.Module):
    """`clusters` of equal size; a state has logits for the tokens of the best `chosen` of them.

    `token_ordering` [V] int64 has the tokens cluster by cluster, as servers read it; it is a parameter since
    it goes wherever the weights go, and has no gradient. """

    def __init__(self, hidden: int, vocab_size: int, clusters: int, chosen: int) -> None:
        super().__init__()
        self.clusters, self.chosen = clusters, chosen
        self.centroids = nn.Linear(hidden, clusters, bias=False)
        self.token_ordering = nn.Parameter(torch.arange(vocab_size), requires_grad=False)

    @torch.no_grad()
    def start(self, rows: Tensor) -> None:
        """Begins with clusters of the head's `rows` [V, hidden], and their means."""
        self.token_ordering.copy_(ordering(rows, self.clusters))
        self.centroids.weight.copy_(rows[self.token_ordering].unflatten(0, (self.clusters, -1)).mean(1))

    def losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy [n] float32 of the clusters of tokens `labels` [n], for states [n, hidden]."""
        size = self.token_ordering.numel() // self.clusters
        places = torch.empty_like(self.token_ordering)
        places[self.token_ordering] = torch.arange(places.numel(), device=places.device)
        return F.cross_entropy(self.centroids(hidden).float(), places[labels.clamp(min=0)] // size,
                               reduction="none")

    def masked(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """logits [n, V] of states [n, hidden], those of all tokens outside of the chosen clusters one below
        the lowest inside: a number that any precision holds, where servers take their smallest."""
        best = self.centroids(hidden).topk(self.chosen, dim=-1).indices
        tokens = self.token_ordering.view(self.clusters, -1)[best].flatten(1)
        inside = logits.gather(-1, tokens)
        floor = inside.amin(-1, keepdim=True) - 1
        return floor.expand_as(logits).scatter(-1, tokens, inside)


def ordering(rows: Tensor, clusters: int) -> Tensor:
    """ids [V] of `rows` [V, H] in groups of V / clusters that lie near each other: the rows are halved where
    they differ most, and each half again."""
    size = len(rows) // clusters

    def halved(ids: Tensor, count: int) -> Tensor:
        if count == 1:
            return ids
        own = rows[ids].float()
        own = own - own.mean(0)
        direction = own[own.norm(dim=-1).argmax()]
        for _ in range(ROUNDS):
            direction = F.normalize(own.T @ (own @ direction), dim=0)
        sides = ids[(own @ direction).argsort(stable=True)].split([count // 2 * size,
                                                                  (count - count // 2) * size])
        return torch.cat([halved(sides[0], count // 2), halved(sides[1], count - count // 2)])

    return halved(torch.arange(len(rows), device=rows.device), clusters)

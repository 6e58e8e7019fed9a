"""Graph networks of PyTorch Geometric over ragged graphs: nodes and edges vary independently."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.entry import Batch, Entry, seeded

CLASSES = 5
_FEATURES = {"features": 8}
_WIDTHS: dict[str, int] = {**_FEATURES, "width": 16}


class Nodes(nn.Module):
    """Two layers of one kind, and the cross-entropy of each node's class."""

    def __init__(self, kind: str, features: int, width: int, **options: Any) -> None:
        super().__init__()
        from torch_geometric import nn as geometric  # pyright: ignore[reportMissingImports]

        make = getattr(geometric, kind)
        self.first = make(features, width, **options)
        self.second = make(width, CLASSES, **options)

    def forward(self, x: Tensor, edge_index: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        h = F.relu(self.first(x, edge_index))
        return F.cross_entropy(self.second(h, edge_index), labels)


class OfPerceptrons(nn.Module):
    """Layers that PyTorch Geometric makes of a network: GIN, edge convolution."""

    def __init__(self, kind: str, features: int, width: int, doubled: bool) -> None:
        super().__init__()
        from torch_geometric import nn as geometric  # pyright: ignore[reportMissingImports]

        def layer(before: int, after: int) -> nn.Module:
            inner = nn.Sequential(
                nn.Linear(before * (1 + doubled), width), nn.ReLU(), nn.Linear(width, after)
            )
            return getattr(geometric, kind)(inner)

        self.first, self.second = layer(features, width), layer(width, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        h = F.relu(self.first(x, edge_index))
        return F.cross_entropy(self.second(h, edge_index), labels)


class Pooled(nn.Module):
    """Graph convolutions and the mean of all nodes of a graph."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        from torch_geometric import nn as geometric  # pyright: ignore[reportMissingImports]

        self.convolution = geometric.GraphConv(features, width)
        self.pool = geometric.global_mean_pool
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the graphs' classes."""
        h = F.relu(self.convolution(x, edge_index))
        return F.cross_entropy(self.head(self.pool(h, graph, labels.shape[0])), labels)


def graphs(nodes: int, edges: int, features: int) -> Batch:
    """A graph with loops and double edges among the others, as they come."""
    generator = seeded(nodes, edges)
    return {
        "x": torch.randn(nodes, features, generator=generator),
        "edge_index": torch.randint(0, nodes, (2, edges), generator=generator),
        "labels": torch.randint(0, CLASSES, (nodes,), generator=generator),
    }


def _many(nodes: int, edges: int, count: int, features: int) -> Batch:
    found = graphs(nodes, edges, features)
    generator = seeded(nodes, count)
    found["graph"] = torch.randint(0, count, (nodes,), generator=generator).sort().values
    found["labels"] = torch.randint(0, CLASSES, (count,), generator=generator)
    return found


def _of_nodes(
    kind: str, make: Any = Nodes, least: tuple[int, int] = (1, 1), **options: Any
) -> Entry:
    return Entry(
        name=f"PyG {kind}",
        source="torch_geometric",
        make=partial(make, kind, **_WIDTHS, **options),
        batch=partial(graphs, **_FEATURES),
        ranges={"nodes": (least[0], 64), "edges": (least[1], 256)},
        axes={"x": {0: "nodes"}, "edge_index": {1: "edges"}, "labels": {0: "nodes"}},
        sizes=[(7, 12), least, (64, 256), (30, 41)],
    )


ENTRIES = [
    _of_nodes("GCNConv"),
    _of_nodes("GATConv"),
    _of_nodes("GATv2Conv"),
    _of_nodes("SAGEConv"),
    _of_nodes("GraphConv"),
    _of_nodes("TransformerConv"),
    # It takes the greatest of the edges that are no loops: there must be one.
    _of_nodes("ChebConv", least=(3, 5), K=3),
    _of_nodes("TAGConv"),
    _of_nodes("ARMAConv"),
    _of_nodes("LEConv"),
    _of_nodes("ResGatedGraphConv"),
    _of_nodes("SGConv", K=2),
    _of_nodes("GeneralConv"),
    _of_nodes("ClusterGCNConv"),
    _of_nodes("FeaStConv", heads=2),
    _of_nodes("GINConv", OfPerceptrons, doubled=False),
    _of_nodes("EdgeConv", OfPerceptrons, doubled=True),
    Entry(
        name="PyG GraphConv, pooled",
        source="torch_geometric",
        make=partial(Pooled, **_WIDTHS),
        batch=partial(_many, **_FEATURES),
        ranges={"nodes": (1, 64), "edges": (1, 256), "count": (1, 9)},
        axes={
            "x": {0: "nodes"},
            "edge_index": {1: "edges"},
            "graph": {0: "nodes"},
            "labels": {0: "count"},
        },
        sizes=[(7, 12, 3), (1, 1, 1), (64, 256, 9), (30, 41, 2)],
    ),
]

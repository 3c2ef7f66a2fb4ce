"""Batches of PyTorch Geometric are cut by graphs: nodes, edges, texts and targets of each graph stay together."""

import sys
from importlib import import_module

import pytest
import torch

import mgpu_core
from mgpu_core.support.extras import MissingExtra

pytestmark = pytest.mark.slow
data = pytest.importorskip("torch_geometric.data")
nn = pytest.importorskip("torch_geometric.nn")

from mgpu_core.integrations.pyg import register_batches  # noqa: E402

NODES = (3, 5, 2, 7, 4)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head, self.seen = nn.GCNConv(4, 8), torch.nn.Linear(8, 3), []

    def forward(self, batch, scale=None):
        self.seen.append((batch.num_nodes, tuple(batch.name)))
        scores = self.head(nn.global_mean_pool(self.conv(batch.x, batch.edge_index).relu(), batch.batch))
        return scores if scale is None else scores * scale


def graph(nodes, kind=data.Data):
    edges = torch.randint(nodes, (2, 3 * nodes))
    return kind(x=torch.randn(nodes, 4), edge_index=edges, y=torch.tensor([nodes % 3]), name=f"of {nodes}")


def batch_of(kind=data.Data, nodes=NODES):
    torch.manual_seed(0)
    return data.Batch.from_data_list([graph(each, kind) for each in nodes])


@pytest.fixture(autouse=True)
def registered():
    register_batches()


def test_outputs_and_gradients_are_those_of_one_device(ranks):
    batch, net = batch_of(), Net()
    scale = torch.rand(len(NODES), 1)
    wanted = net(batch, scale)
    wanted.square().sum().backward()
    grads = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    found = mgpu_core.DataParallel(net, ["cpu"] * ranks)(batch, scale)
    found.square().sum().backward()
    torch.testing.assert_close(found, wanted)
    for parameter, grad in zip(net.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_each_rank_gets_whole_graphs():
    net = Net()
    mgpu_core.DataParallel(net, ["cpu"] * 3)(batch_of())
    assert sorted(net.seen) == [(4, ("of 4",)), (8, ("of 3", "of 5")), (9, ("of 2", "of 7"))]


def test_a_step_trains_as_one_device(ranks):
    batch, losses = batch_of(), []
    for each in (ranks, 0):
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        step = mgpu_core.TrainStep(net, torch.nn.functional.cross_entropy, optimizer, ["cpu"] * each) if each else None
        for _ in range(4):
            if step is not None:
                losses.append(step(batch, batch.y).item())
                continue
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(batch), batch.y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:4] == pytest.approx(losses[4:], abs=1e-6)
    assert losses[3] < losses[0]


class Own(data.Data):
    """Its second index counts from the first graph of the batch on, as edge_index does."""

    def __inc__(self, key, value, *args, **kwargs):
        return self.num_nodes if key == "center_of_node" else super().__inc__(key, value, *args, **kwargs)


def test_other_classes_of_graphs():
    class Pool(torch.nn.Module):
        def forward(self, batch):
            assert batch.num_graphs < len(NODES)
            if isinstance(batch, Own):
                return batch.x[batch.center_of_node]
            return nn.global_add_pool(batch["atom"].x, batch["atom"].batch)

    register_batches(Own, data.HeteroData)
    own = batch_of(Own)
    own = data.Batch.from_data_list([each.update({"center_of_node": torch.tensor([1])}) for each in own.to_data_list()])
    mixed = [data.HeteroData(atom={"x": torch.randn(n, 4)}, bond={"x": torch.randn(2, 2)}) for n in NODES]
    for batch in (own, data.Batch.from_data_list(mixed)):
        whole = own.x[own.center_of_node] if batch is own else torch.stack([each["atom"].x.sum(0) for each in mixed])
        torch.testing.assert_close(mgpu_core.DataParallel(Pool(), ["cpu"] * 2)(batch), whole)


@pytest.mark.several_ranks
def test_follow_batch_of_a_loader_is_kept(ranks):
    class Pool(torch.nn.Module):
        def forward(self, batch):
            assert "x_batch" in batch
            return nn.global_add_pool(batch.x, batch.x_batch) + batch.x_ptr.diff()[:, None]

    register_batches()
    graphs = batch_of().to_data_list()
    batch = data.Batch.from_data_list(graphs, follow_batch=["x"])
    torch.testing.assert_close(mgpu_core.DataParallel(Pool(), ["cpu"] * ranks)(batch), Pool()(batch))


@pytest.mark.parametrize("name", ["pe", "note"])
def test_what_belongs_to_no_graph_is_refused_by_name(name):
    register_batches()
    batch = batch_of()
    batch[name] = torch.randn(len(batch.x), 4) if name == "pe" else "text"
    with pytest.raises(TypeError, match=rf"batch\.{name} belongs to the batch and to no graph"):
        mgpu_core.DataParallel(Net(), ["cpu"] * 2)(batch)


class Other(data.Data):
    pass


def test_a_batch_of_a_class_that_is_not_registered_runs_whole_on_each_rank():
    out = mgpu_core.DataParallel(Net(), ["cpu"] * 2)(batch_of(Other))
    assert len(out) == 2 * len(NODES)


def test_targets_of_another_number_of_graphs_are_refused():
    with pytest.raises(ValueError, match="differ in their number of rows"):
        mgpu_core.DataParallel(Net(), ["cpu"] * 2)(batch_of(), torch.ones(4, 1))


def test_what_is_no_class_of_graphs_is_refused():
    for wrong in (torch.Tensor, data.Data(), "Data"):
        with pytest.raises(TypeError, match="is not a class of graphs"):
            register_batches(wrong)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    monkeypatch.delitem(sys.modules, "mgpu_core.integrations.pyg")
    with pytest.raises(MissingExtra, match=r"needs torch_geometric: pip install 'mgpu-core\[pyg\]'"):
        import_module("mgpu_core.integrations.pyg")

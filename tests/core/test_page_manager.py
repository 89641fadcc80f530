"""The article's page manager: its calls work as in the article, and the parts are what they are said to be."""

import math

import pytest
import torch

from oval_core.errors import ConfigError
from oval_core.routing.page_manager import PageManager

E = 8


def observed() -> PageManager:
    """Pages 0..5 of a text; 0 goes with 1 twice and with 3 once."""
    manager = PageManager(16, E, rebuild_every=3)
    manager.update(6)
    for pages in ([0, 1], [1, 0], [0, 3]):
        manager.update_cooc_graph(torch.tensor(pages))
    return manager


def graph_part(manager: PageManager, ids: list[int]) -> torch.Tensor:
    return manager.get_local_embedding(torch.tensor(ids))[..., E:]


def test_the_articles_calls_work() -> None:
    manager = PageManager(max_pages=2048, page_embedding_dim=128)
    top_ids = torch.tensor([[3, 7, 1, 2000], [4, 5, 6, 7]])
    rebuilt = [manager.update_cooc_graph(top_ids) for _ in range(100)]
    assert rebuilt == [False] * 99 + [True]
    embedding = manager.get_local_embedding(top_ids)
    assert embedding.shape == (2, 4, 256)
    assert embedding.isfinite().all()
    starts, sizes = manager.get_page_offsets(torch.tensor([2, 0]), torch.tensor([4, 32, 7]))
    assert starts.tolist() == [36, 0]
    assert sizes.tolist() == [7, 4]


def test_the_graph_part_is_the_normalised_sum_over_neighbours() -> None:
    manager = observed()
    table = manager.page_embeddings.weight
    got = graph_part(manager, [0, 2, 0])
    # row sums of A + I: page 0 has 1 + 2 + 1, page 1 has 1 + 2, page 3 has 1 + 1
    first = table[0] / 4 + 2 * table[1] / math.sqrt(4 * 3) + table[3] / math.sqrt(4 * 2)
    torch.testing.assert_close(got, torch.stack((first, table[2], first)))


def test_the_position_part_decays_from_the_newest_page() -> None:
    manager = observed()
    position = manager.get_local_embedding(torch.arange(6))[:, :E]
    half = E // 2
    torch.testing.assert_close(position[5], torch.tensor([1.0] * half + [0.0] * half))
    norms = position.pow(2).sum(-1).sqrt() / math.sqrt(half)
    torch.testing.assert_close(norms, torch.exp(-torch.arange(5, -1, -1) / 32))
    manager.update(10)
    later = manager.get_local_embedding(torch.arange(4, 10))[:, :E]
    torch.testing.assert_close(later, position)


def test_rows_of_a_batch_make_no_pairs_with_each_other() -> None:
    manager = PageManager(16, E, rebuild_every=1)
    manager.update_cooc_graph(torch.tensor([[1, 2], [2, 5]]))
    assert manager.graph.counts() == {(1, 2): 1, (2, 5): 1}


def test_pages_that_ended_leave_the_graph() -> None:
    manager = observed()
    manager.update(3)
    assert manager.graph.counts() == {(0, 1): 2}
    manager.update(6)  # another page 3 has no past
    torch.testing.assert_close(graph_part(manager, [3])[0], manager.page_embeddings.weight[3])
    manager.graph.rebuild()
    assert manager.graph.counts() == {(0, 1): 2}
    manager.reset()
    assert manager.graph.counts() == {}
    assert manager.num_pages == 0


def test_what_is_learned_learns_and_is_saved_without_the_graph() -> None:
    manager = observed()
    graph_part(manager, [0]).sum().backward()
    reached = manager.page_embeddings.weight.grad.abs().sum(-1) > 0
    assert reached.nonzero().flatten().tolist() == [0, 1, 3]
    assert (manager.graph_conv.weight.grad != 0).all()
    other = PageManager(16, E)
    other.load_state_dict(manager.state_dict())
    torch.testing.assert_close(other.page_embeddings.weight, manager.page_embeddings.weight)
    assert other.graph.counts() == {}


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0), (2, 3, 2)])
def test_any_shape_of_ids_is_taken(shape: tuple[int, ...]) -> None:
    for manager in (observed(), PageManager(4, E)):
        ids = torch.zeros(shape, dtype=torch.int32)
        assert manager.get_local_embedding(ids).shape == (*shape, 2 * E)


def test_empty_selections_are_steps_too() -> None:
    manager = PageManager(4, E, rebuild_every=3)
    empty = [torch.zeros(0).long(), torch.zeros(2, 0).long(), torch.zeros(0, 2).long()]
    assert [manager.update_cooc_graph(ids) for ids in empty] == [False, False, True]
    assert manager.num_pages == 0


def test_offsets_take_pages_in_any_order() -> None:
    manager = observed()
    starts, sizes = manager.get_page_offsets(torch.tensor([[1], [0]]), torch.tensor([3, 0, 5]))
    assert (starts.tolist(), sizes.tolist()) == ([[3], [0]], [[0], [3]])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_pages: got 0\. Allowed: 1 or more"):
        PageManager(0, E)
    with pytest.raises(ConfigError, match=r"page_embedding_dim: got 7\. Allowed: an even number"):
        PageManager(4, 7)
    manager = PageManager(4, E)
    for call in (manager.update_cooc_graph, manager.get_local_embedding):
        with pytest.raises(ConfigError, match=r"page_ids: got 1\.\.4\. Allowed: 0\.\.3"):
            call(torch.tensor([1, 4]))
        with pytest.raises(ConfigError, match=r"got -1\.\.2"):
            call(torch.tensor([-1, 2]))
        with pytest.raises(ConfigError, match=r"page_ids: got torch\.float32"):
            call(torch.tensor([1.0]))
        with pytest.raises(ConfigError, match=r"page_ids: got torch\.bool"):
            call(torch.tensor([True]))
        with pytest.raises(ConfigError, match="page_ids: got list"):
            call([1, 2])
    with pytest.raises(ConfigError, match=r"got shape \[1, 1, 2\]"):
        manager.update_cooc_graph(torch.tensor([[[1, 2]]]))
    with pytest.raises(ConfigError, match=r"num_pages: got 5\. Allowed: 0\.\.4"):
        manager.update(5)


@pytest.mark.parametrize("sizes", [[3, 4], [3, -1, 4], [[3, 4, 5]]])
def test_bad_page_sizes_are_refused(sizes: list) -> None:
    with pytest.raises(ConfigError, match=r"page_sizes: got shape .* for pages up to 2"):
        PageManager(4, E).get_page_offsets(torch.tensor([0, 2]), torch.tensor(sizes))

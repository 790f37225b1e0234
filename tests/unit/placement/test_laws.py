"""Laws that hold for every placement: each rank once, every resource used as written, hosts that agree with slots."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rl_platform.config.schema.cluster import PLACEMENT, Cluster
from rl_platform.errors import PlacementError
from rl_platform.placement.grammar import read
from rl_platform.placement.inventory import Inventory, Node
from rl_platform.placement.scheduler import schedule


@st.composite
def placements(draw: st.DrawFn) -> tuple[Inventory, dict[str, str]]:
    """Clusters with a placement that can be met: every segment lies on one node and its counts divide."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    texts: dict[str, str] = {}
    for key in draw(st.lists(st.sampled_from(["actor,critic", "rollout", "reward", "env"]), min_size=1, unique=True)):
        segments, ranks, start = [], 0, 0
        for size in sizes:
            first = draw(st.integers(0, size - 1))
            count = draw(st.integers(1, size - first))
            many = draw(st.sampled_from([n for n in range(1, 17) if n % count == 0 or count % n == 0]))
            segments.append((start + first, count, ranks, many))
            ranks, start = ranks + many, start + size
            if draw(st.booleans()):
                break
        texts[key] = ",".join(f"{a}-{a + n - 1}:{r}-{r + m - 1}" for a, n, r, m in segments)
    nodes = tuple(Node(f"node-{index}", size) for index, size in enumerate(sizes))
    return Inventory(nodes), texts


@given(placements())
def test_laws(case: tuple[Inventory, dict[str, str]]) -> None:
    inventory, texts = case
    cluster = Cluster(num_nodes=len(inventory.nodes), component_placement=dict(texts))
    placement = schedule(cluster, inventory)
    hosted = Counter(member for host in placement.hosts for member in host.members)
    every_rank = {(name, slot.rank) for name, slots in placement.components.items() for slot in slots}
    assert hosted == Counter(every_rank)
    assert len({host.name for host in placement.hosts}) == len(placement.hosts)
    resources = inventory.resources(None)
    for entry in read(dict(texts))[0]:
        for name in entry.components:
            slots = placement.components[name]
            assert [slot.rank for slot in slots] == list(range(len(slots)))
            for segment in entry.segments:
                assert segment.resources is not None
                assert segment.ranks is not None
                times = Counter((slots[r].node, local) for r in segment.ranks for local in slots[r].accelerators)
                expected = {resources[resource] for resource in segment.resources}
                each = max(1, len(segment.ranks) // len(segment.resources))
                assert times == dict.fromkeys(expected, each)
                sizes = {len(slots[rank].accelerators) for rank in segment.ranks}
                assert sizes == {max(1, len(segment.resources) // len(segment.ranks))}
    for host in placement.hosts:
        assert set(host.accelerators) <= set(range(inventory.nodes[host.node].num_accelerators))
        assert host.env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, host.accelerators))
        for name, rank in host.members:
            slot = placement.components[name][rank]
            assert (slot.node, slot.accelerators) == (host.node, host.accelerators)
    owners = Counter((s.node, a) for slots in placement.components.values() for s in slots for a in s.accelerators)
    for name, slots in placement.components.items():
        for slot in slots:
            assert slot.shared == any(owners[slot.node, local] > 1 for local in slot.accelerators)
        others = {*placement.takes_turns_with(name), *placement.runs_beside(name)}
        assert others == set(placement.components) - {name}
        assert not set(placement.takes_turns_with(name)) & set(placement.runs_beside(name))


@given(
    st.text(alphabet="0123,:-", min_size=1, max_size=9),
    st.integers(1, 3),
    st.integers(0, 4),
    st.sampled_from([None, "node", "x"]),
)
def test_any_text_is_placed_or_explained(text: str, nodes: int, gpus: int, group: str | None) -> None:
    cluster = Cluster(num_nodes=nodes, component_placement={"actor": {"node_group": group, "placement": text}})
    problems = []
    try:
        slots = schedule(cluster, Inventory.declared(nodes, gpus)).components["actor"]
    except PlacementError as error:
        slots, problems = (), error.problems
    assert bool(slots) != bool(problems)
    assert all(problem.key.startswith(f"{PLACEMENT}.actor") and problem.message for problem in problems)
    assert all(slot.node < nodes and set(slot.accelerators) <= set(range(gpus)) for slot in slots)

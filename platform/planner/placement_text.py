"""Shows a placement as plain text: components of each GPU and process, and phases that run at the same time.

Memory and time are estimated by the planner. Long plans are collapsed: GPUs that are used alike become one column,
processes of the same components one line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rl_platform.errors import ranges
from rl_platform.placement.inventory import VISIBLE_DEVICES, Inventory
from rl_platform.placement.scheduler import Host, Placement

_WIDTH = 110
_LISTED = 20  # columns and processes that are shown singly; more are collapsed


@dataclass(frozen=True)
class _Column:
    """One accelerator, or a node's CPU (`number` None): the ranks on it by component."""

    node: int
    number: int | None
    ranks: tuple[tuple[int, ...], ...]
    owned: tuple[int, ...]  # accelerators of each of these ranks

    def continues(self, other: _Column) -> bool:
        """Returns whether this column continues `other`: it is used in the same way, by the same or the next ranks."""
        if (self.number is None, self.owned) != (other.number is None, other.owned):
            return False
        return all(
            len(mine) == len(before) and (not mine or mine[0] - before[-1] in (0, 1))
            for mine, before in zip(self.ranks, other.ranks, strict=True)
        )


def render(placement: Placement, inventory: Inventory) -> str:
    """Returns the plan of `placement`, computed from `inventory`, in lines of at most about 110 characters."""
    processes = len(placement.hosts)
    obstacle = placement.one_process_obstacle
    title = f"Processes: {processes}"
    if not obstacle:
        title += " (under the local runtime: threads of the launching one)"
    else:
        title += f" (no local runtime: {obstacle})"
    sections = [
        [_summary(inventory)],
        _grid(placement, inventory),
        [title, *_processes(placement, inventory)],
        ["At the same time:", *_concurrency(placement, inventory)],
    ]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _summary(inventory: Inventory) -> str:
    nodes = len(inventory.nodes)
    parts = [f"{nodes} node{'s' if nodes != 1 else ''}", _count(inventory.num_accelerators, inventory.noun)]
    cpus = [node.cpus for node in inventory.nodes if node.cpus is not None]
    memory = [node.memory for node in inventory.nodes if node.memory is not None]
    if cpus:
        parts.append(_count(sum(cpus), "CPU"))
    if memory:
        parts.append(f"{sum(memory) / 2**30:.1f} GiB of memory")
    origin = f" ({inventory.origin})" if inventory.origin else ""
    return f"Cluster: {', '.join(parts)}{origin}"


def _grid(placement: Placement, inventory: Inventory) -> list[str]:
    """Returns the table component x GPU with ranks as cells, wrapped into blocks if it is too wide."""
    columns = list(_columns(placement, inventory))
    runs: list[list[_Column]] = []
    for column in columns:
        if len(columns) > _LISTED and runs and column.continues(runs[-1][-1]):
            runs[-1].append(column)
        else:
            runs.append([column])
    labels = ["", inventory.noun if inventory.num_accelerators else "", *placement.components]
    margin = max(map(len, labels))
    lines: list[str] = []
    for block in _blocks([_cells(run, inventory) for run in runs], _WIDTH - margin):
        widths = [max(map(len, cells[1:])) for cells in block]
        lines += ["", _node_line(block, widths, margin)] if lines else [_node_line(block, widths, margin)]
        for row, label in list(enumerate(labels))[1:]:
            cells = [column[row].ljust(width) for column, width in zip(block, widths, strict=True)]
            lines.append("  ".join([label.ljust(margin), *cells]).rstrip())
    idle = [number for number, column in enumerate(columns) if column.number is not None and not any(column.ranks)]
    if idle:
        lines.append(f"Used by no component: {inventory.noun} {number_ranges(idle)}")
    return lines


def _columns(placement: Placement, inventory: Inventory) -> Iterator[_Column]:
    """Yields every accelerator in order, then the CPU of every node that has ranks without one."""
    names = list(placement.components)
    ranks: dict[tuple[int, int | None], list[list[int]]] = {}
    owned: dict[tuple[int, int | None], list[int]] = {}
    for index, name in enumerate(names):
        for slot in placement.components[name]:
            for local in slot.accelerators or (None,):
                key = (slot.node, local)
                if key not in ranks:
                    ranks[key], owned[key] = [[] for _ in names], [0] * len(names)
                ranks[key][index].append(slot.rank)
                owned[key][index] = len(slot.accelerators)
    empty: list[list[int]] = [[] for _ in names]
    accelerators = [
        (node, local) for node, entry in enumerate(inventory.nodes) for local in range(entry.num_accelerators)
    ]
    cpus = sorted(node for node, local in ranks if local is None)
    for number, (node, local) in enumerate([*accelerators, *((node, None) for node in cpus)]):
        used = tuple(map(tuple, ranks.get((node, local), empty)))
        yield _Column(node, None if local is None else number, used, tuple(owned.get((node, local), [0] * len(names))))


def _cells(run: Sequence[_Column], inventory: Inventory) -> list[str]:
    """Returns the texts of one column: node, GPU numbers, then the ranks of each component."""
    first, last = run[0], run[-1]
    node = inventory.nodes[first.node].name
    if first.node != last.node:
        node += f" .. {inventory.nodes[last.node].name}"
    numbers = [column.number for column in run if column.number is not None]
    cells = [node, number_ranges(numbers) if numbers else "cpu"]
    for index, owned in enumerate(first.owned):
        ranks = sorted({rank for column in run for rank in column.ranks[index]})
        text = number_ranges(ranks) if ranks else "."
        if len(run) > 1 and owned > 1:
            text += f" ({owned} {inventory.noun}s each)"
        elif len(run) > 1 and len(first.ranks[index]) > 1:
            text += f" ({len(first.ranks[index])} per {inventory.noun if numbers else 'node'})"
        cells.append(text)
    return cells


def _node_line(block: Sequence[Sequence[str]], widths: list[int], margin: int) -> str:
    """Returns the line of nodes, each name above its first column. Widens a node's last column for a long name."""
    line = " " * margin
    start = 0
    while start < len(block):
        stop = start + 1
        while stop < len(block) and block[stop][0] == block[start][0]:
            stop += 1
        missing = len(block[start][0]) - (sum(widths[start:stop]) + 2 * (stop - start - 1))
        widths[stop - 1] += max(0, missing)
        line += "  " + block[start][0].ljust(sum(widths[start:stop]) + 2 * (stop - start - 1))
        start = stop
    return line.rstrip()


def _blocks(columns: Sequence[list[str]], width: int) -> Iterator[list[list[str]]]:
    block: list[list[str]] = []
    used = 0
    for cells in columns:
        needed = 2 + max(map(len, cells[1:] if block and block[-1][0] == cells[0] else cells))
        if block and used + needed > width:
            yield block
            block, used = [], 0
        block.append(cells)
        used += needed
    yield block


def _processes(placement: Placement, inventory: Inventory) -> list[str]:
    """Returns one row per process, or per kind of process if there are many."""
    groups: dict[object, list[Host]] = {}
    for host in placement.hosts:
        kind = host.name if len(placement.hosts) <= _LISTED else host.name.partition("[")[0]
        groups.setdefault(kind, []).append(host)
    rows = [("process", "node", VISIBLE_DEVICES, "variables")]
    for hosts in groups.values():
        name = hosts[0].name
        if len(hosts) > 1:
            name = f"{name.partition('[')[0]}[{number_ranges(sorted(host.members[0][1] for host in hosts))}]"
        nodes = _nodes({host.node for host in hosts}, inventory)
        devices = _distinct(host.env[VISIBLE_DEVICES] or "(empty)" for host in hosts if VISIBLE_DEVICES in host.env)
        variables = _distinct(
            " ".join(f"{key}={value}" for key, value in host.env.items() if key != VISIBLE_DEVICES) for host in hosts
        )
        rows.append((name, nodes, devices, variables))
    kept = [column for column in range(4) if any(row[column] for row in rows[1:])]
    widths = [max(len(row[column]) for row in rows) for column in kept]
    return [
        "  " + "  ".join(row[column].ljust(width) for column, width in zip(kept, widths, strict=True)).rstrip()
        for row in rows
    ]


def _concurrency(placement: Placement, inventory: Inventory) -> list[str]:
    """Returns for every component those that it takes turns with on an accelerator, and those it may compute beside."""
    if not any(placement.accelerators.values()):
        nodes = _nodes({slot.node for slots in placement.components.values() for slot in slots}, inventory)
        return [f"  no rank has a GPU: all of them compute on the CPU of {nodes} and share its cores"]
    margin = max(map(len, placement.components))
    lines: list[str] = []
    for name, slots in placement.components.items():
        turns, beside = placement.takes_turns_with(name), placement.runs_beside(name)
        parts = (
            []
            if placement.accelerators[name]
            else [f"on the CPU of {_nodes({slot.node for slot in slots}, inventory)}"]
        )
        ranks = Counter((slot.node, local) for slot in slots for local in slot.accelerators)
        if ranks and max(ranks.values()) > 1:
            parts.append(f"up to {max(ranks.values())} of its ranks share a {inventory.noun}")
        parts += [f"takes turns with {', '.join(turns)}"] if turns else []
        parts += [f"runs beside {', '.join(beside)}"] if beside else []
        lines.append(f"  {name.ljust(margin)}  {'; '.join(parts) or 'alone'}")
    return lines


def _nodes(nodes: set[int], inventory: Inventory) -> str:
    first, last = inventory.nodes[min(nodes)].name, inventory.nodes[max(nodes)].name
    if len(nodes) <= 2:
        return ", ".join(dict.fromkeys((first, last)))
    return (
        f"{first} .. {last}" if len(nodes) == max(nodes) - min(nodes) + 1 else f"{len(nodes)} nodes, {first} .. {last}"
    )


def _distinct(texts: Iterable[str]) -> str:
    """Returns the first eight different texts in order; empty if there is only the empty text."""
    seen = [*dict.fromkeys(texts)]
    if not any(seen):
        return ""
    more = f" | {len(seen) - 8} more" if len(seen) > 8 else ""
    return " | ".join(text or "(none)" for text in seen[:8]) + more


def _count(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'s' if count > 1 else ''}"


def number_ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as `0-3,8`, with only a count from the thirteenth range on."""
    texts = ranges(numbers)
    return ",".join(texts) if len(texts) <= 12 else f"{','.join(texts[:12])},... ({len(numbers)} in all)"

"""What imports what, read from the source: rooms in one direction, and no circle of files, lazy imports included."""

import ast
import graphlib
import pathlib


ROOT = pathlib.Path(__file__).parents[1]
# Each room and those that it may import.
ROOMS = {
    "blockwise": set(),
    "runtime": set(),
    "dataset": {"runtime"},
    "pipelines": {"blockwise", "runtime"},
    "training": {"blockwise", "dataset", "runtime"},
}


def modules():
    """From the dotted name of each file of the rooms to its path."""
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported(path, known):
    """The files of the rooms that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            of_module = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in of_module if {name, node.module} & {*known})


def test_rooms_import_in_one_direction():
    known = modules()
    for name, path in known.items():
        room = name.split(".")[0]
        others = {other.split(".")[0] for other in imported(path, known)} - {room}
        assert others <= ROOMS[room], f"{name} imports from {others - ROOMS[room]}"


def test_no_files_import_each_other_in_a_circle():
    known = modules()
    graph = {name: set(imported(path, known)) - {name} for name, path in known.items()}
    assert sum(map(len, graph.values())) > 50, "or nothing was read"
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the circle
    assert set(order) == set(known)

"""The layout: import directions, lazy heavy libraries, the folder mapping."""

from __future__ import annotations

import ast
import graphlib
import importlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from as_installed import FOLDERS

import rl_platform

ROOT = Path(__file__).parents[2]
SOURCES = {folder: package.replace("/", ".") for folder, package in FOLDERS.items()}

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# Level, folder and extras of each row of the page's table of folders
ROWS = re.findall(r"^\| (\d) \| `(\S+?)/?` \|.*\| *(.*?) *\|$", PAGE, re.MULTILINE)


def area_of(path: Path) -> str:
    """`platform/engines/rollout/base.py` -> engines, `platform/records.py` -> records, `envs/...` -> envs."""
    folder, first, *_ = path.relative_to(ROOT).parts
    return first.removesuffix(".py") if folder in ("api", "platform") else folder


def module_in(folder: str) -> str:
    """`platform/models/vlas` -> rl_platform.models.vlas"""
    first, _, rest = folder.partition("/")
    return f"{SOURCES[first]}.{rest.replace('/', '.')}"


LEVEL = {  # a module imports its own level and those below
    area_of(path): int(level)
    for level, folder, _ in ROWS
    for path in ROOT.glob(folder if folder.endswith(".py") else f"{folder}/**/*.py")
}
EXTRAS = {  # folders that may be removed: the core imports them only when a config needs them
    module_in(extra): extra
    for _, folder, extras in ROWS
    for extra in ([folder] if extras.startswith("the folder") else re.findall(r"`([^`]+)/`", extras))
}
NEEDS = {  # extras that an extra imports freely
    "components.demonstrations": ("engines.offloading",),
    "components.policy_recordings": ("algorithms.variants",),
    "models.policies": ("algorithms.variants", "models.pretrained"),
    "models.vlas": ("models.policies", "models.pretrained", "placement.estimates"),
    "python": ("launch.start_checks", "launch.views"),
    "launch.start_checks": ("algorithms.variants", "config.explanations", "components.agents", "models.policies"),
    "launch.plans": ("launch.start_checks", "launch.tools", "planner"),
    "engines.rollout.hosted": ("runtime.weights",),
    "runtime.ray": ("runtime.weights",),
    "planner": ("placement.estimates",),
    "runners.collection": ("algorithms.variants", "placement.estimates"),
    "launch.replay": ("launch.start_checks", "placement.estimates"),
    "launch.reallocation": ("launch.start_checks", "planner"),
    "components.agents": ("envs.reasoning.answers", "envs.reasoning.sandbox"),
    "components.reward_models": ("envs.reasoning.servers", "models.pretrained"),
    "engines.rollout.sglang": ("models.pretrained", "engines.rollout.hosted", "runtime.weights"),
    "engines.rollout.vllm": ("engines.rollout.hosted", "runtime.weights"),
    "engines.training.megatron": ("models.adapters", "models.context", "models.experts", "placement.estimates"),
    "envs.embodied.build_problems": ("envs.embodied.suites",),
    "envs.embodied.pictures": ("envs.embodied.build_problems",),
    "envs.embodied.mujoco": ("envs.embodied.saved_states",),
    "envs.embodied.user_envs": ("envs.embodied.saved_states",),
    "envs.embodied.processes": ("envs.embodied.build_problems",),
    "envs.embodied.remote": ("envs.embodied.processes",),
    "envs.embodied.suites": ("envs.embodied.build_problems",),
    "envs.reasoning.sandbox": ("envs.reasoning.servers",),
    "launch.check": (
        "algorithms.variants",
        "components.agents",
        "components.policy_recordings",
        "launch.card",
        "launch.start_checks",
        "launch.views",
    ),
    "launch.saved": (
        "models.policies",
        "models.pretrained",
        "models.vlas",
        "launch.start_checks",
        "launch.views",
        "models.adapters",
    ),
    "launch.rehearse": (
        "envs.reasoning.sources",
        "launch.start_checks",
        "launch.tools",
        "models.pretrained",
        "placement.estimates",
    ),
    "launch.tools": (
        "config.explanations",
        "config.rules",
        "envs.embodied.build_problems",
        "envs.embodied.pictures",
        "envs.embodied.processes",
        "envs.embodied.remote",
        "envs.reasoning.sources",
        "launch.card",
        "launch.views",
        "launch.plans",
        "launch.replay",
        "launch.saved",
        "launch.start_checks",
        "placement.estimates",
        "planner",
    ),
}
SEAMS = (
    "platform/algorithms/advantages.py",
    "platform/models/causal_lm.py",
    "platform/models/tokenizer.py",
    "platform/config/extends.py",
    "platform/config/loader.py",
    "platform/algorithms/losses.py",
    "platform/algorithms/policy_losses.py",
    "platform/components/actor.py",
    "launch/start_checks/model_problems.py",
    "platform/models/build.py",
    "platform/runners/ppo.py",
    "platform/components/learner.py",
    "envs/embodied/block.py",
    "envs/embodied/env_facts.py",
    "platform/placement/decisions.py",
    "platform/runners/watching/utilization.py",
    "platform/components/env_evaluation.py",
    "platform/components/environment.py",
    "platform/components/rollout.py",
    "platform/components/reward.py",
    "platform/engines/rollout/torch.py",
    "platform/engines/training/fsdp.py",
    "platform/models/forward.py",
    "platform/runners/embodied.py",
    "platform/runners/reasoning.py",
    "platform/runners/recovery.py",
    "platform/models/embodied_policy.py",
    "launch/start_checks/policy_fit.py",
    "launch/runtime_choice.py",
    "launch/tools/known_datasets.py",
    "envs/reasoning/scoring_worker.py",
    "envs/reasoning/verifiers.py",
    "platform/acceleration.py",
    "platform/engines/training/build.py",
    "platform/engines/rollout/build.py",
    "platform/engines/rollout/hosted/build.py",
    "api/python/inspection.py",
    "envs/embodied/stepping.py",
    "envs/embodied/descriptions.py",
    "envs/embodied/vector.py",
    "envs/reasoning/tasks.py",
    "launch/cli.py",
    "launch/command.py",
    "launch/placed_config.py",
    "launch/start_checks/missing.py",
    "launch/start_checks/env_spaces.py",
    "launch/start_checks/model_checks.py",
    "launch/start_checks/preflight.py",
    "launch/start_checks/user_code_checks.py",
    "launch/session.py",
    "launch/rehearse/findings.py",
    "launch/start_checks/sharding.py",
    "launch/tools/calibrate.py",
    "launch/tools/export.py",
    "launch/tools/installed.py",
)
LAZY = {
    "megatron": "engines/training/megatron",
    "sglang": "engines/rollout/sglang",
    "vllm": "engines/rollout/vllm",
}  # the folder of each


@cache
def source_files() -> list[Path]:
    return sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


@cache
def names_of_extras() -> dict[str, str]:
    """The constants that hold the name of an extra, as WATCHING, with their values."""
    constants = [node for path in source_files() for node in tree_of(path).body if isinstance(node, ast.Assign)]
    named = {
        ast.unparse(node.targets[0]): node.value.value for node in constants if isinstance(node.value, ast.Constant)
    }
    return {name: value for name, value in named.items() if value in EXTRAS}


@cache
def found(tree: ast.AST) -> list[tuple[str, int]]:
    """Absolute dotted names that `extras.find` imports anywhere below `tree`, with their line."""
    calls = [node for node in nodes_of(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "find"]
    names = []
    for call in calls:
        extra, name = (ast.unparse(argument).strip("\"'") for argument in call.args[:2])
        names.append((f"{names_of_extras().get(extra, extra)}.{name}", call.lineno))
    return names


@cache
def imports(tree: ast.AST) -> list[tuple[str, int]]:
    """Absolute dotted names that are imported anywhere below `tree`, with their line."""
    names = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = f"{'.' * node.level}{node.module or ''}"
            names += [(f"{module}.{alias.name}", node.lineno) for alias in node.names]
    return names + found(tree)


@cache
def at_import_time(tree: ast.Module) -> list[tuple[str, int]]:
    """The imports that run when the module itself is imported."""
    functions = [node for node in nodes_of(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines = [range(function.lineno, (function.end_lineno or 0) + 1) for function in functions]
    return [(name, line) for name, line in imports(tree) if not any(line in body for body in lines)]


def extra_of(name: str) -> str | None:
    """The extra that a dotted name or a path below the repository belongs to; None: the core."""
    return next((extra for extra, folder in EXTRAS.items() if f"{name}.".startswith((f"{extra}.", f"{folder}/"))), None)


def for_types_only(tree: ast.Module) -> set[int]:
    """The lines of imports that only type checkers read."""
    blocks = (node for node in nodes_of(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {line for block in blocks for _, line in imports(block)}


def test_imports_point_one_way():
    problems = []
    for path in source_files():
        area, extra = area_of(path), extra_of(str(path.relative_to(ROOT)))
        for name, line in imports(tree_of(path)):
            if name.startswith("."):
                problems.append(f"{path}:{line}: relative import")
            elif name.startswith("rl_platform."):
                imported = name.split(".")[1]
                lazy = extra_of(name) not in (None, extra)  # has a law of its own, below
                if LEVEL[imported] > LEVEL[area] and not lazy:
                    problems.append(f"{path}:{line}: {area} must not import {imported}")
    assert not problems, "\n".join(problems)


def test_the_core_imports_extras_within_functions_of_few_files_only():
    problems = []
    for path in source_files():
        relative, tree = path.relative_to(ROOT), tree_of(path)
        own, types, eager = extra_of(str(relative)), for_types_only(tree), set(at_import_time(tree))
        for name, line in imports(tree):
            extra = extra_of(name)
            needed = (f"rl_platform.{name}" for name in NEEDS.get((own or "").removeprefix("rl_platform."), ()))
            if extra in (None, own, *needed) or line in types:
                continue
            if (name, line) in eager:
                problems.append(f"{relative}:{line}: import {name} within a function, as {extra} is an extra")
            elif str(relative) not in SEAMS:
                problems.append(f"{relative}:{line}: {extra} is an extra, which only these files import: {SEAMS}")
    assert not problems, "\n".join(problems)


def test_names_that_are_found_in_extras_exist():
    names = [name for path in source_files() for name, _ in found(tree_of(path))]
    assert len(names) > 10
    for module, _, attribute in (name.rpartition(".") for name in names):
        assert extra_of(module) is not None, f"{module} is in no extra"
        assert hasattr(importlib.import_module(module), attribute), f"{module} has no {attribute}"


def test_the_page_of_the_architecture_has_the_size_of_the_core():
    printed = re.search(r"The core has about ([\d,]+) lines in ([\d,]+) files, and extras have about ([\d,]+)", PAGE)
    assert printed is not None
    lines: dict[bool, list[int]] = {True: [], False: []}
    for path in source_files():
        is_core = extra_of(str(path.relative_to(ROOT))) is None
        lines[is_core].append(len(path.read_text(encoding="utf-8").splitlines()))
    counted = sum(lines[True]), len(lines[True]), sum(lines[False])
    for number, text in zip(counted, printed.groups(), strict=True):
        assert abs(number - int(text.replace(",", ""))) <= 0.03 * number, f"docs/architecture.md: {counted}"


def test_the_table_of_what_to_read_first_has_the_sizes_of_its_files():
    listed = PAGE.partition("<!-- read first -->")[2].partition("<!-- /read first -->")[0]
    rows = re.findall(r"^\| .* \| (`.*`) \| ([\d,]+) \|$", listed, re.MULTILINE)
    (total,) = re.findall(r"^\| \*\*total\*\* \| \| \*\*([\d,]+)\*\* \|$", listed, re.MULTILINE)
    assert len(rows) == listed.count("\n| ") - 2 > 5  # all but the header and the total
    problems, lines = [], 0
    for files, printed in rows:
        paths = [path for pattern in re.findall(r"`([^`]+)`", files) for path in ROOT.glob(pattern)]
        counted = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        lines += counted
        if abs(counted - int(printed.replace(",", ""))) > 0.05 * counted:
            problems.append(f"docs/architecture.md: {files} have {counted} lines, not {printed}")
    if abs(lines - int(total.replace(",", ""))) > 0.05 * lines:
        problems.append(f"docs/architecture.md: the files to read first have {lines} lines, not {total}")
    assert not problems, "\n".join(problems)


def test_the_page_names_gradients_and_c_functions_outside_of_accelerators():
    section = PAGE.partition("### Gradients and C functions")[2].partition("\n## ")[0]
    named = {path for pattern in re.findall(r"`([\w/.]+(?:/|\.py))`", section) for path in below(ROOT / pattern)}
    own = re.compile(r"^import ctypes\b|\(torch\.autograd\.Function\):", re.MULTILINE)
    outside = {path for path in source_files() if extra_of(str(path.relative_to(ROOT))) != "rl_platform.accel"}
    written = {path for path in outside if own.search(path.read_text(encoding="utf-8"))}
    assert len(written) > 5
    assert written - named == set(), "docs/architecture.md does not name these files"
    assert [path for path in named - written if path.parent.name not in ("accel", "sandbox")] == []


def below(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def test_folders_of_a_level_import_each_other_without_a_cycle():
    imported: dict[str, dict[str, str]] = {area: {} for area in LEVEL}  # where an area imports another one
    for path in source_files():
        area, own = area_of(path), extra_of(str(path.relative_to(ROOT)))
        for name, line in imports(tree_of(path)):
            first, other, *_ = f"{name}..".split(".")
            same_level = first == "rl_platform" and other != area and LEVEL.get(other) == LEVEL[area]
            if same_level and extra_of(name) in (None, own):
                imported[area].setdefault(other, f"{path.relative_to(ROOT)}:{line}")
    check_acyclic(imported)


def test_modules_import_each_other_without_a_cycle():
    """Imports inside functions count as well, but for those of an extra by modules outside it."""
    paths = {module_of(path): path for path in source_files()}
    imported: dict[str, dict[str, str]] = {}
    for module, path in paths.items():
        typed, own = for_types_only(tree_of(path)), extra_of(str(path.relative_to(ROOT)))
        imported[module] = {
            other: f"{path.relative_to(ROOT)}:{line}"
            for name, line in imports(tree_of(path))
            for other in [name if name in paths else name.rpartition(".")[0]]
            if other in paths and line not in typed and extra_of(other) in (None, own)
        }
    check_acyclic(imported)


def check_acyclic(imported: dict[str, dict[str, str]]) -> None:
    """`imported`: the imports of each module or folder, with the place of each."""
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        cycle = error.args[1][::-1]
        pytest.fail("\n".join(f"{one} imports {other}: {imported[one][other]}" for one, other in pairwise(cycle)))


def module_of(path: Path) -> str:
    """The dotted name that a file is imported by."""
    folder, *parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([SOURCES[folder], *(part for part in parts if part != "__init__")])


def test_areas_are_all_known():
    assert {area_of(path) for path in source_files()} <= LEVEL.keys()


def test_no_two_files_share_a_name():
    """Apart from `build`, interfaces of engines, files of a config section, and modules that users import."""
    sections = {path.name for path in (ROOT / "platform" / "config" / "schema").glob("*.py")}
    wanted = sections | {"__init__.py", "build.py", "base.py", "metrics.py"}
    paths: dict[str, list[str]] = {}
    for path in source_files():
        paths.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    assert [where for name, where in paths.items() if len(where) > 1 and name not in wanted] == []


def test_no_two_public_classes_share_a_name():
    """Apart from those that users name."""
    paths: dict[str, list[str]] = {}
    for path in source_files():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                paths.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    shared = {name: where for name, where in paths.items() if len(where) > 1}
    assert {name: where for name, where in shared.items() if name != "Metrics"} == {}


def test_ray_is_imported_by_its_runtime_only():
    allowed = {*(ROOT / "platform" / "runtime" / "ray").glob("*.py")}
    for path in source_files():
        names = {name.split(".")[0] for name, _ in imports(tree_of(path))}
        assert "ray" not in names or path in allowed, path


@pytest.mark.parametrize("library", LAZY)
def test_optional_engines_are_imported_by_their_engine_file_only_and_lazily_elsewhere(library: str):
    for path in source_files():
        names = {name.split(".")[0] for name, _ in at_import_time(tree_of(path))}
        own = str(ROOT / "platform" / LAZY[library])
        assert library not in names or str(path).startswith(f"{own}/"), path


def test_nobody_imports_by_folder_name():
    """`envs.x` beside `rl_platform.envs.x` would be one file as two modules."""
    areas = "|".join(LEVEL)  # platform alone is the standard library's
    wrong = re.compile(rf"^\s*(from|import) ((api|envs|launch)\b|platform(\.| import )({areas})\b)", re.MULTILINE)
    for path in [*source_files(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        found = wrong.search(path.read_text())
        assert found is None, f"{path}: {found}"


def test_platform_is_the_standard_librarys_from_the_root_of_the_repository():
    assert not (ROOT / "platform" / "__init__.py").exists()
    command = [sys.executable, "-c", "import platform, sys; assert sys.path[0] == ''; print(platform.__file__)"]
    imported = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(imported) == Path(sysconfig.get_path("stdlib")) / "platform.py" == Path(platform.__file__)


def test_importing_the_package_imports_no_other_module_of_it():
    """Nor a library: every command and every child process imports it."""
    code = "import sys; before = {*sys.modules}; import rl_platform; print(*sorted({*sys.modules} - before))"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name.partition(".")[0] for name in imported} <= {"rl_platform", *sys.stdlib_module_names}
    assert [name for name in imported if name.startswith("rl_platform.")] == []


def test_the_names_of_the_package_are_those_that_type_checkers_read():
    tree = tree_of(ROOT / "api" / "__init__.py")
    for_types = [
        (f"{node.module}.{alias.name}", alias.name, alias.asname)
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert all(name == shown for _, name, shown in for_types), "import NAME as NAME: else it is not exported"
    modules = rl_platform._MODULES.items()
    assert [full for full, _, _ in for_types] == [m if m.endswith(f".{name}") else f"{m}.{name}" for name, m in modules]
    for name in rl_platform.__all__:
        assert getattr(rl_platform, name) is not None
        assert name in dir(rl_platform)
    assert not hasattr(rl_platform, "trian")


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_table_under_its_import_name(tmp_path: Path):
    tree = tmp_path / "tree"  # setuptools builds in the tree it is given
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, tree]
    subprocess.run(command, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        held = sorted(name for name in wheel.namelist() if name.endswith((".py", ".yaml", ".html", "py.typed")))
    files = [(folder, path) for folder in SOURCES for path in (ROOT / folder).rglob("*")]
    expected = [
        f"{SOURCES[folder].replace('.', '/')}/{path.relative_to(ROOT / folder)}"
        for folder, path in files
        if path.suffix in (".py", ".yaml", ".html", ".typed")
    ]
    assert held == sorted(expected)  # a name in both `api/` and `platform/` would be there once instead of twice

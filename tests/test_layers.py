"""Who may import whom, and what no file may hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from sourcetree import (
    ROOT,
    Import,
    Module,
    imported_modules,
    modules,
    package_folders,
    tensor_modules,
    text_files,
    written_modules,
)

RANKS = {
    "core": 0,
    "kernels": 1,
    "proto": 1,
    "models": 2,
    "cache": 2,
    "engine": 3,
    "kv_transfer": 3,
    "router": 4,
    "prefill_worker": 4,
    "decode_worker": 4,
    "client": 4,
    "cluster": 5,
    "bench": 6,
    # One above bench: `kvferry bench` runs the benches.
    "cli": 7,
}

# Imports inside functions, each with the reason why it cannot stand at the top of its file.
HELP_IS_INSTANT = "`kvferry --help` must not wait for a heavy third party"
NIXL_IS_OPTIONAL = "NIXL comes with the extra `rdma`, and starts a library of network drivers"
GRPC_IS_QUIET = "gRPC reads how much to say when it is imported; main() sets that first"
LAZY = {
    ("cli/generate.py", "kvferry.client.client"): GRPC_IS_QUIET,
    ("cli/status.py", "kvferry.client.client"): GRPC_IS_QUIET,
    ("cli/demo.py", "kvferry.client.client"): GRPC_IS_QUIET,
    ("cli/serve.py", "kvferry.cluster.system"): HELP_IS_INSTANT,
    ("cli/demo.py", "kvferry.cluster.system"): HELP_IS_INSTANT,
    ("cli/model.py", "kvferry.models.load"): HELP_IS_INSTANT,
    ("kv_transfer/transports/nixl_agent.py", "nixl_cu12"): NIXL_IS_OPTIONAL,
}

# Packages in which torch is never loaded, not even by what they import.
TORCH_FREE_PACKAGES = {"core", "proto", "router", "client"}
# Accounting, planning and policy, wherever they live.
TORCH_FREE_MODULES = re.compile(
    r"\.(plan|policy|schedul\w*|ledger|lease\w*|admission|block_pool|blocks|prefix_index|"
    r"block_hash|hashing|table|sequences|loop|session|spec|rope_spec|tokenizer|header|frames)$"
)
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "jsonpickle"}


def imports() -> Iterator[tuple[Module, Import]]:
    for module in written_modules():
        for imported in module.imports():
            yield module, imported


def where(module: Module, imported: Import) -> str:
    return f"{module.where}:{imported.lineno} imports {imported.target}"


def imports_root(imported: Import, *roots: str) -> bool:
    return imported.target.split(".")[0] in roots


def test_every_package_has_a_rank() -> None:
    assert {name.split(".")[1] for name in package_folders()} == set(RANKS)


def test_imports_point_down() -> None:
    wrong = []
    for module, imported in imports():
        assert not imported.target.startswith("."), where(module, imported)
        if not imports_root(imported, "kvferry"):
            continue
        parts = imported.target.split(".")
        package = parts[1] if len(parts) > 1 else imported.names[0]
        if package != module.package and RANKS[package] >= RANKS[module.package]:
            wrong.append(where(module, imported))
    assert wrong == []


def test_modules_do_not_import_in_circles() -> None:
    graph = {module.name: imported_modules(module) for module in modules()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("ray", re.compile(r"cluster/|.*/actor\.py$")),
        ("grpc", re.compile(r"proto/|router/|client/|engine/session\.py$")),
        ("fastapi", re.compile(r"router/")),
        ("starlette", re.compile(r"router/")),
        ("uvicorn", re.compile(r"router/")),
        ("triton", re.compile(r"kernels/")),
        ("transformers", re.compile(r"models/|bench/")),
        ("tokenizers", re.compile(r"models/")),
        ("typer", re.compile(r"cli/")),
        ("rich", re.compile(r"cli/|bench/")),
        ("yaml", re.compile(r"core/config\.py$")),
    ],
)
def test_a_library_is_met_in_one_place(library: str, allowed: re.Pattern[str]) -> None:
    wrong = [
        where(module, imported)
        for module, imported in imports()
        if imports_root(imported, library) and not allowed.match(module.where)
    ]
    assert wrong == []


def test_only_the_listed_modules_import_torch() -> None:
    importing = {
        module.name
        for module, imported in imports()
        if imports_root(imported, "torch", "triton", "safetensors")
    }
    listed = tensor_modules()
    assert importing - listed == set(), "not in pyproject.toml's list of modules with torch"
    assert listed - importing == set(), "in pyproject.toml's list, but do not import torch"


def test_accounting_never_loads_torch() -> None:
    graph = {module.name: imported_modules(module) for module in modules()}
    tensors = tensor_modules()
    wrong = []
    for module in modules():
        if module.package not in TORCH_FREE_PACKAGES and not TORCH_FREE_MODULES.search(module.name):
            continue
        reached, waiting = {module.name}, [module.name]
        while waiting:
            new = graph[waiting.pop()] - reached
            reached |= new
            waiting += new
        wrong += [f"{module.name} reaches {name}" for name in sorted(reached & tensors)]
    assert wrong == []


def test_imports_stand_at_the_top() -> None:
    lazy = {(module.where, imported.target) for module, imported in imports() if imported.lazy}
    assert lazy - set(LAZY) == set(), "imported inside a function or only for type checking"
    assert set(LAZY) - lazy == set(), "allowed, but no longer there"


def test_annotations_are_never_evaluated() -> None:
    annotated = ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign
    wrong = [
        module.where
        for module in written_modules()
        if any(isinstance(node, annotated) for node in ast.walk(module.tree))
        and not any(imported.target == "__future__" for imported in module.imports())
    ]
    assert wrong == []


def test_nothing_is_pickled() -> None:
    wrong = [where(m, i) for m, i in imports() if imports_root(i, *PICKLES)]
    for module in written_modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load"):
                wrong.append(f"{module.where}:{node.lineno} {ast.unparse(node)}")
    assert wrong == []


# Put together here so that this file does not hold what it forbids.
FORBIDDEN = {
    "a marker of unfinished work": re.compile(
        r"\b(TO" r"DO|FIX" r"ME|XX" r"X|NotImplemented" r"Error)\b"
    ),
    "a path of one machine": re.compile(r"(?<![\w.])/(work|home|root|Users)/\w"),
    "a path outside the project": re.compile(r"\.\./shar" r"ed"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what: str) -> None:
    wrong = []
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if FORBIDDEN[what].search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert wrong == []

"""What a module offers: packages hold no code of their own, private names stay in their module."""

from __future__ import annotations

import ast

from sourcetree import modules, written_modules


def test_a_package_is_a_sentence_and_nothing_else() -> None:
    """Importing one module must never load its neighbours: ``__init__`` only says what it is."""
    wrong = []
    for module in written_modules():
        if module.path.name == "__init__.py" and (
            len(module.tree.body) != 1 or not ast.get_docstring(module.tree)
        ):
            wrong.append(module.where)
    assert wrong == []


def test_every_module_says_what_it_is() -> None:
    assert [m.where for m in written_modules() if not ast.get_docstring(m.tree)] == []


def test_private_names_stay_in_their_module() -> None:
    wrong = [
        f"{module.where}:{imported.lineno} {name}"
        for module in written_modules()
        for imported in module.imports()
        if imported.target.startswith("kvferry")
        for name in (*imported.target.split("."), *imported.names)
        if name.startswith("_")
    ]
    assert wrong == []


def test_imported_names_exist() -> None:
    """Also those behind a lazy import, which would only fail when it runs."""
    defined = {module.name: top_level_names(module.tree) for module in modules()}
    wrong = []
    for module in written_modules():
        for imported in module.imports():
            if not imported.target.startswith("kvferry."):
                continue
            offered = defined.get(imported.target, set()) | {
                name.removeprefix(f"{imported.target}.")
                for name in defined
                if name.startswith(f"{imported.target}.")
            }
            wrong += [
                f"{module.where}:{imported.lineno} {imported.target}.{name}"
                for name in imported.names
                if name not in offered and "_pb2" not in imported.target
            ]
    assert wrong == []


def test_all_lists_what_is_public() -> None:
    """A module that has ``__all__`` lists exactly the public names that it defines."""
    wrong = {}
    for module in written_modules():
        listed = declared_all(module.tree)
        if listed is not None:
            own = {name for name in own_names(module.tree) if not name.startswith("_")}
            if listed != own:
                wrong[module.where] = listed ^ own
    assert wrong == {}


def declared_all(tree: ast.Module) -> set[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return None


def own_names(tree: ast.Module) -> set[str]:
    """Classes and functions that the module defines itself."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)} & top_level_names(tree)


def top_level_names(tree: ast.Module) -> set[str]:
    """Every name that the module binds outside functions and classes, imported ones too."""
    names: set[str] = set()
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        for child in ast.walk(node):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                names.add(child.id)
        waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return names

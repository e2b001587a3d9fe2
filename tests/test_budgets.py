"""Size budgets: what has to be read at once stays small enough to be read at once."""

from __future__ import annotations

import ast

from sourcetree import ROOT, Module, written_modules

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
MAX_PARAMETERS = 8

# (file, function) -> why it may be larger than the budget.
EXCEPTIONS: dict[tuple[str, str], str] = {}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_kernel(module: Module, function: Function) -> bool:
    return module.package == "kernels" or any(
        "jit" in ast.unparse(decorator) for decorator in function.decorator_list
    )


def is_command(function: Function) -> bool:
    """A command line's options are its parameters; typer reads them from the signature."""
    return "typer." in ast.unparse(function.args)


def lines(function: Function) -> int:
    """Lines from ``def`` to the end, docstring not counted."""
    assert function.end_lineno is not None
    total = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        total -= first.end_lineno - first.lineno + 1
    return total


def parameters(function: Function) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_files_are_small() -> None:
    paths = [module.path for module in written_modules()] + sorted((ROOT / "tests").rglob("*.py"))
    sizes = {p.relative_to(ROOT).as_posix(): len(p.read_text().splitlines()) for p in paths}
    assert {path: size for path, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_functions_are_small() -> None:
    wrong = {}
    for module in written_modules():
        for function in module.functions():
            budget = MAX_KERNEL_LINES if is_kernel(module, function) else MAX_FUNCTION_LINES
            budget = budget if not is_command(function) else 2 * MAX_FUNCTION_LINES
            if lines(function) > budget and (module.where, function.name) not in EXCEPTIONS:
                wrong[f"{module.where}:{function.lineno} {function.name}"] = lines(function)
    assert wrong == {}


def test_functions_take_few_parameters() -> None:
    wrong = {}
    for module in written_modules():
        for function in module.functions():
            free = is_kernel(module, function) or is_command(function)
            if free or (module.where, function.name) in EXCEPTIONS:
                continue
            if parameters(function) > MAX_PARAMETERS:
                wrong[f"{module.where}:{function.lineno} {function.name}"] = parameters(function)
    assert wrong == {}


def test_exceptions_are_still_needed() -> None:
    names = {(m.where, f.name) for m in written_modules() for f in m.functions()}
    assert set(EXCEPTIONS) - names == set()

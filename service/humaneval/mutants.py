"""Wrong and hostile submissions for a HumanEval problem, made from its canonical solution: what a model of middling skill would write."""

import ast
from collections.abc import Callable, Iterator

from service.humaneval.tasks import Problem

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Mod: ast.FloorDiv}


def solution(problem: Problem) -> str:
    """The right answer, as a whole file."""
    return problem.prompt + problem.canonical_solution


def mistakes(problem: Problem) -> list[str]:
    """Whole files that are wrong in an honest way, most are not equal to the right answer in behaviour; none is equal in text."""
    made = [_mutated(problem, change) for change in (_off_by_one, _other_comparison, _other_operator)]
    blank = problem.prompt + "    return None\n"
    return list(dict.fromkeys([text for text in made if text is not None] + [blank]))


def broken(problem: Problem) -> str:
    """Does not compile."""
    return problem.prompt + "    retrun (\n"


def endless(problem: Problem) -> str:
    return problem.prompt + "    while True:\n        pass\n"


def cheats(problem: Problem) -> dict[str, str]:
    """Files that try to pass without solving, by what they try. None may pass."""
    head, body = problem.prompt, "    return None\n"
    return {
        "exits 0 on import": "import os\nos._exit(0)\n" + head + body,
        "exits 0 when called": head + "    import os\n    os._exit(0)\n",
        "raises SystemExit": head + "    raise SystemExit(0)\n",
        "equals everything": "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\n\n" + head + "    return Any()\n",
    }


def _mutated(problem: Problem, change: Callable[[ast.AST], bool]) -> str | None:
    """The right answer with the first possible `change` inside the function under test, or None where there is none."""
    tree = ast.parse(solution(problem))
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name == problem.entry_point:
            if any(change(node) for node in _code(function)):
                return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    return None


def _code(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Every node below the statements of `function`, its docstring left out."""
    for statement in function.body:
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            yield from ast.walk(statement)


def _off_by_one(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
        return True
    return False


def _other_comparison(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        node.ops[0] = _COMPARISONS[type(node.ops[0])]()
        return True
    return False


def _other_operator(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        node.op = _OPERATORS[type(node.op)]()
        return True
    return False

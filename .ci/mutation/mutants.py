"""Which mutants there are, which of them are drawn, and which test files belong to a module."""

import ast
import difflib
import hashlib
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED = 20
TESTS = {
    "recall_lab/runner.py": "runner run bad_input workload",
    "recall_lab/folders.py": "files runner run sweep",
    "recall_lab/sweep.py": "runner sweep run",
    "recall_lab/files.py": "files run",
    "recall_lab/results.py": "results series",
    "recall_lab/series.py": "series results",
    "recall_lab/train.py": "train checkpoint workload architecture",
    "recall_lab/data.py": "data train",
    "recall_lab/checkpoint.py": "checkpoint train",
    "recall_lab/metrics.py": "metrics train",
    "recall_lab/theory/*.py": "theory theory_access laws",
    "recall_lab/oracle.py": "oracle oracle_gates neutral_gates architecture",
    "recall_lab/probe/base.py": "probe effective_attention retrieval workload architecture",
    "recall_lab/probe/cost.py": "cost probe architecture",
    "recall_lab/probe/dynamic_access.py": "dynamic_access probe architecture",
    "recall_lab/probe/effective_attention.py": "effective_attention probe architecture",
    "recall_lab/probe/queries.py": "retrieval dynamic_access probe architecture",
    "recall_lab/probe/retrieval.py": "retrieval probe architecture",
    "recall_lab/probe/rows.py": "probe effective_attention architecture",
    "recall_lab/probe/state_retention.py": "state_retention probe architecture",
    "recall_lab/task/base.py": "task task_draws task_input task_other",
    "recall_lab/mixer/*.py": "mixer_start mixer_options architecture",
}
"""Module → the names of its test files (tests/test_NAME.py), those that fail soonest first."""

START = {"__init__", "__post_init__"}
"""Of mixers, only these functions are mutated (and all of decay.py): they set the starting values."""


def sources() -> dict[str, str]:
    """Every source file that is mutated, and its tests."""
    found = {}
    for pattern, tests in TESTS.items():
        for path in sorted(ROOT.glob(pattern)):
            if path.name != "__init__.py":
                found[str(path.relative_to(ROOT))] = tests
    return found


def regions(module: str, tree: ast.Module) -> list[ast.stmt]:
    """The parts of a module that are mutated."""
    if module.startswith("recall_lab/mixer/") and not module.endswith("/decay.py"):
        return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in START]
    return tree.body


def silent(tree: ast.Module) -> Iterator[ast.AST]:
    """The parts whose change alters no behaviour: annotations, type aliases, and the texts of logs and errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield node.annotation
        if isinstance(node, ast.FunctionDef) and node.returns:
            yield node.returns
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("log.", "print_line", "warnings.warn")):
            yield node
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and ast.unparse(node.func) == "require"):
            yield from (part for part in ast.walk(node) if isinstance(part, ast.JoinedStr))
    for node in tree.body:
        alias = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if alias and not node.targets[0].id.isupper() and node.targets[0].id[0].isupper():
            yield node


def span(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def statements(tree: ast.Module) -> list[ast.stmt]:
    """The statements that can be removed: calls, raises, and assignments to attributes and elements."""
    found = []
    for node in ast.walk(tree):
        call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        stored = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)
        if call or stored or isinstance(node, ast.AugAssign | ast.Raise | ast.Delete):
            found.append(node)
    return found


def mutants(module: str) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Position → (operator, number of its occurrence) of all mutants of a module."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = (ROOT / module).read_text("utf-8")
    tree, nodes, rows = ast.parse(source), list(ast_nodes(get_ast(source))), source.splitlines()
    mutated = [span(node) for node in regions(module, tree)]
    skipped = [span(node) for node in silent(tree)]
    places = [("removed", number, span(node)[0]) for number, node in enumerate(statements(tree))]
    for name in operator_names():
        if not get_operator(name).arguments():
            starts = [start for node in nodes for start, _ in get_operator(name)().mutation_positions(node)]
            for number, (line, column) in enumerate(starts):
                if line <= len(rows):
                    places.append((name, number, (line, len(rows[line - 1][:column].encode()))))
    found: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name, number, position in places:
        if any(a <= position < b for a, b in mutated) and not any(a <= position < b for a, b in skipped):
            found.setdefault(position, []).append((name, number))
    return found


def apply(source: str, operator: str, number: int) -> str:
    """The mutated source; the same source where the operator cannot be applied."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    if operator != "removed":
        try:
            mutated = mutate_code(source, get_operator(operator)(), number) or source
            with warnings.catch_warnings(action="ignore"):
                compile(mutated, "", "exec")
        except (AttributeError, SyntaxError):  # cosmic-ray fails at `except a.B`, and makes ^names of **names
            return source
        return mutated
    (line, column), (last, end) = span(statements(ast.parse(source))[number])
    lines = [text.encode() for text in source.splitlines(keepends=True)]
    lines[line - 1 : last] = [lines[line - 1][:column] + b"pass" + lines[last - 1][end:]]
    return b"".join(lines).decode()


def draw(number: int) -> list[dict[str, str]]:
    """The mutants that are tested (see the module)."""
    pools = {module: mutants(module) for module in sources()}
    pools = {module: pool for module, pool in pools.items() if pool}
    lines = {module: len({line for line, _ in pool}) for module, pool in pools.items()}
    rng, chosen, due = random.Random(SEED), [], 0.0
    for module, pool in pools.items():
        source = (ROOT / module).read_text("utf-8")
        due += number * lines[module] / sum(lines.values())
        for position in rng.sample(sorted(pool), len(pool)):
            if len(chosen) >= round(due):
                break
            operator, occurrence = rng.choice(pool[position])
            mutated = apply(source, operator, occurrence)
            if mutated != source:
                diff = difflib.unified_diff(source.split("\n"), mutated.split("\n"), module, module, n=0, lineterm="")
                text = "\n".join(diff)
                key = hashlib.sha256(text.encode()).hexdigest()[:8]
                mutant = {"key": key, "module": module, "line": position[0], "operator": operator}
                chosen.append(mutant | {"mutated": mutated, "diff": text})
    return chosen


def lines_of(module: str, line: int) -> range:
    """The lines of the statement, or of the head of the block, that a line belongs to."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse((ROOT / module).read_text("utf-8"))):
        if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno:
            body = getattr(node, "body", None)
            last = node.end_lineno if not body else max(node.lineno, body[0].lineno - 1)
            if line <= last:
                found = range(node.lineno, last + 1)
    return found

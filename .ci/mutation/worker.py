"""What runs in a process of its own, in a copy of the checkout: finding out what each test executes, or mutants."""

import contextlib
import fnmatch
import gc
import importlib
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import TextIO

OPTIONS = [
    "-q",
    *["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:unraisableexception"],
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
]
UNTESTED = 77
"""Exit status of a child that could not apply its mutant."""

LONGEST = 5
"""Seconds of processor time that a test may take to be used here."""

SLOW = [
    "tests/test_architecture.py::test_[!d]*",
    "tests/test_series.py::test_no_setting_can_be_averaged_away[[!ls]*",
    "tests/test_sweep.py::*parallel*",
    "tests/test_sweep.py::*ctrl_c*",
    "tests/test_sweep.py::*signal*",
    "tests/test_sweep.py::*kill*",
    "tests/test_sweep.py::*resolver*",
    "tests/test_sweep.py::*full_disk*",
    "tests/test_run.py::*report*",
    "tests/test_run.py::*lost_a_file*",
    "tests/test_run.py::*damaged_file*",
    "tests/test_run.py::*word_for_a_number*",
    "tests/test_workload.py::*left_out*",
]
"""Patterns of tests left out: they start many processes, or look at the source rather than at what it does."""


class Learning:
    """For pytest: runs all tests but SLOW, with a time limit, and notes which of them executes which line."""

    def __init__(self, data: Path) -> None:
        import coverage

        self.seconds: dict[str, float] = {}
        self.passed: set[str] = set()
        self.coverage = coverage.Coverage(str(data), source=["recall_lab"], config_file=False)
        self.coverage.erase()
        self.coverage.start()

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = [item for item in items if not any(fnmatch.fnmatchcase(item.nodeid, slow) for slow in SLOW)]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.seconds[nodeid] = -sum(os.times()[:4])
        self.coverage.switch_context(nodeid)
        signal.signal(signal.SIGVTALRM, too_slow)
        signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        self.seconds[nodeid] += sum(os.times()[:4])
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: object) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)


def too_slow(number: int, frame: object) -> None:
    raise TimeoutError


def learn(folder: Path, files: list[str]) -> None:
    """Prints, as one line of JSON, the tests of the files, how long they take, and who executes which line."""
    import coverage
    import pytest

    plugin = Learning(folder / "coverage.data")
    with (folder / "output.txt").open("w") as output, contextlib.redirect_stdout(output):
        pytest.main([*OPTIONS, *files], plugins=[plugin])
    plugin.coverage.stop()
    plugin.coverage.save()
    data = coverage.CoverageData(str(folder / "coverage.data"))
    data.read()
    executed = {}
    for path in data.measured_files():
        module = Path(path).relative_to(folder.resolve()).as_posix()
        lines = data.contexts_by_lineno(path).items()
        executed[module] = {line: [name for name in names if name in plugin.passed] for line, names in lines}
    failed = sorted(set(plugin.seconds) - plugin.passed)
    seconds = {name: round(plugin.seconds[name], 2) for name in plugin.passed}
    print(json.dumps({"files": files, "seconds": seconds, "executed": executed, "failed": failed}))


def own(code: CodeType) -> tuple:
    """What a code object does, its line numbers and the functions inside it aside."""
    constants = [repr(x) for x in code.co_consts if not isinstance(x, CodeType)]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_exceptiontable, constants


def inside(code: CodeType) -> list[CodeType]:
    return [x for x in code.co_consts if isinstance(x, CodeType)]


def same(a: CodeType, b: CodeType) -> bool:
    there = inside(a), inside(b)
    return own(a) == own(b) and len(there[0]) == len(there[1]) and all(map(same, *there))


def differing(a: CodeType, b: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """The functions of two versions of a module that differ; None where code that is executed on import does."""
    if own(a) != own(b) or len(inside(a)) != len(inside(b)):
        return None
    found = []
    for x, y in zip(inside(a), inside(b), strict=True):
        if not x.co_flags & inspect.CO_OPTIMIZED:  # the body of a class
            deeper = differing(x, y)
            if deeper is None:
                return None
            found += deeper
        elif not same(x, y):
            if x.co_name.startswith("<") and x.co_name != "<lambda>":
                return None
            found.append((x, y))
    return found


class Session:
    """For pytest: instead of running the tests collected, runs those of each mutant in a child of its own.

    The child gives the functions that the mutant changes their new code, wherever they are referred to.
    """

    def __init__(self, mutants: list[dict], folder: Path, limit: float, results: TextIO) -> None:
        self.mutants, self.folder, self.limit, self.results = mutants, folder, limit, results

    def pytest_runtestloop(self, session: object) -> bool:
        for mutant in self.mutants:
            importlib.import_module(mutant["module"].removesuffix(".py").replace("/", "."))
        functions: dict[tuple[str, str], list[FunctionType]] = {}
        for x in gc.get_objects():
            if type(x) is FunctionType and x.__code__.co_filename.startswith(str(self.folder)):
                functions.setdefault((x.__code__.co_filename, x.__code__.co_qualname), []).append(x)
        gc.freeze()
        for mutant in self.mutants:
            run_mutant(mutant, self.folder, self.limit, self.results, lambda: self.child(mutant, session, functions))  # noqa: B023
        return True

    def pytest_runtest_logreport(self, report: object) -> None:
        if report.failed:
            cause = str(report.longrepr).strip().splitlines()[-1]
            (self.folder / "output.txt").write_text(f"FAILED {report.nodeid} ({report.when}): {cause}", "utf-8")

    def child(self, mutant: dict, session: object, functions: dict[tuple[str, str], list[FunctionType]]) -> int:
        path = str(self.folder / mutant["module"])
        for old, new in mutant["code"]:
            named = functions.get((path, old.co_qualname), [])
            # The tests' import hook decorates functions inside functions, so that the outer ones' code differs.
            live = [x for x in named if own(x.__code__) == own(old)] or named
            if not live or any(x.__code__.co_freevars != new.co_freevars for x in live):
                raise LookupError(f"{old.co_qualname} is not found")
            for x in live:
                x.__code__ = new
        rank = {name: i for i, name in enumerate(mutant["tests"])}
        place = {item: rank.get(item.nodeid, rank.get(item.nodeid.partition("::")[0])) for item in session.items}
        items = sorted((item for item in session.items if place[item] is not None), key=place.get)
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return 1
        return 0


def run_mutant(mutant: dict, folder: Path, limit: float, results: TextIO, test: Callable[[], int]) -> None:
    """Calls `test` in a child process, with the mutated source in place, and writes one line of JSON."""
    path = folder / mutant["module"]
    original = path.read_text("utf-8")
    write(path, mutant["mutated"])
    (folder / "output.txt").write_text("", "utf-8")
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        code = UNTESTED
        try:
            code = test()
        except BaseException as error:
            (folder / "output.txt").write_text(f"ERROR {error!r}", "utf-8")
            code = UNTESTED if isinstance(error, LookupError) else 1
        finally:
            os._exit(code)
    code = None
    while code is None and time.monotonic() < started + limit:
        time.sleep(0.05)
        pid, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if pid else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    write(path, original)
    outcome = {None: "timeout", 0: "survived", UNTESTED: "untested"}.get(code, "killed")
    text = (folder / "output.txt").read_text("utf-8", errors="replace").splitlines()
    by = next((line for line in reversed(text) if line.startswith(("FAILED", "ERROR"))), f"exit status {code}")
    seconds = round(time.monotonic() - started, 1)
    result = {"key": mutant["key"], "outcome": outcome, "by": by[:200], "seconds": seconds}
    print(json.dumps(result), file=results, flush=True)


def work(folder: Path, batch: Path, limit: float) -> None:
    """Tests the mutants of a batch: first those of code that is executed on import, each with a fresh import."""
    import beartype, hydra, hypothesis, jaxtyping, pandas, pytest, scipy.stats, torch  # noqa: E401, F401, I001
    import matplotlib.pyplot, rich.progress, seaborn, yaml  # noqa: E401, F401

    results = os.fdopen(os.dup(1), "w")
    warm = []
    for mutant in json.loads(batch.read_text("utf-8")):
        path = folder / mutant["module"]
        versions = (compile(text, str(path), "exec") for text in (path.read_text("utf-8"), mutant["mutated"]))
        mutant["code"] = differing(*versions)
        if mutant["code"]:
            warm.append(mutant)
        else:
            run_mutant(mutant, folder, limit, results, lambda: fresh(folder, mutant["tests"]))  # noqa: B023
    files = sorted({name.partition("::")[0] for mutant in warm for name in mutant["tests"]})
    if warm:
        with (folder / "session.txt").open("w") as output, contextlib.redirect_stdout(output):
            pytest.main([*OPTIONS, "-x", *files], plugins=[Session(warm, folder, limit, results)])


def fresh(folder: Path, tests: list[str]) -> int:
    """Runs the tests in this process, which has not imported recall_lab yet, until the first failure."""
    import pytest

    with (folder / "output.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    return int(pytest.main([*OPTIONS, "-x", *tests]))


def write(path: Path, text: str) -> None:
    """Writes a source file with a time that no earlier version had, so that no outdated bytecode is used for it."""
    later = path.stat().st_mtime + 10
    path.write_text(text, "utf-8")
    os.utime(path, (later, later))


if __name__ == "__main__":
    job, folder, *arguments = sys.argv[1:]
    sys.path[0] = folder
    if job == "learn":
        learn(Path(folder), arguments)
    else:
        work(Path(folder), Path(arguments[0]), float(arguments[1]))

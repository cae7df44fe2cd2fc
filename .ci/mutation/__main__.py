"""Mutation testing: breaks the code in many small ways, one at a time, and lists the breaks that no test notices.

    pip install -e '.[test,mutation]'
    python .ci/mutation             # 300 mutants, two at a time; half an hour on two idle cores
    python .ci/mutation --list      # only shows which mutants are drawn
    python .ci/mutation --again     # only those that survived the last time, after tests were added

A mutant is one change of one statement: by one of cosmic-ray's operators, or by removing the statement (a call, a
raise, an assignment to an attribute or element), for which cosmic-ray has no operator. Left out before drawing are
changes that alter no behaviour: those inside type annotations and type aliases, log messages, and texts of errors.

Mutants are drawn with a fixed seed: per module in proportion to its lines of code, and within a module one mutant per
source position, so that an operator with many variants (+ → −, *, /, …) does not count many times. The draw is kept in
the folder --out, as are the results; an empty folder starts anew.

A first pass runs the test files of the modules (see TESTS in mutants.py) under coverage. Each mutant is then tested by
those tests that execute its statement (for a statement executed on import: all tests of its module), the quickest
first, until one fails, in a copy of this checkout. Each mutant has a process of its own, in which recall_lab is
imported anew. A mutant that makes a test fail, or exceeds the time limit, is killed.
"""

import argparse
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from mutants import ROOT, SEED, draw, lines_of, sources

UNCHANGED = "unchanged"
"""The key of a mutant that changes nothing: it must survive."""

Mutant = dict
"""key, module, line, operator, mutated (the mutated source) and diff."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300, help="mutants drawn")
    parser.add_argument("--processes", type=int, default=2, help="mutants tested at a time")
    parser.add_argument("--budget", type=float, default=30, help="seconds of tests per mutant, as the first pass took")
    parser.add_argument("--limit", type=float, default=240, help="seconds per mutant; more counts as killed")
    parser.add_argument("--batch", type=int, default=10, help="mutants per process, which first imports the libraries")
    parser.add_argument("--launcher", default="", help="command put in front of each process, such as nice")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "mutation", help="folder of draw and results")
    parser.add_argument("--again", action="store_true", help="test the survivors of the last time again")
    parser.add_argument("--all-tests", action="store_true", help="test them by all tests of their module")
    parser.add_argument("--list", action="store_true", help="only show what is drawn")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    drawn, results = options.out / "drawn.json", options.out / "results.jsonl"
    if not drawn.exists():
        drawn.write_text(json.dumps(draw(options.number)), "utf-8")
    chosen = json.loads(drawn.read_text("utf-8"))
    if options.list:
        print("\n".join(f"{m['key']} {m['operator']}\n{m['diff']}\n" for m in chosen))
        return
    done = outcomes(results)
    again = ("untested", "survived") if options.again else ("untested",)
    run([m for m in chosen if done.get(m["key"], "untested") in again], options, results)
    done = outcomes(results)
    summarise(chosen, done)
    if done.get(UNCHANGED, "survived") != "survived":
        sys.exit("the tests fail where nothing is mutated: these results mean nothing")


def run(chosen: list[Mutant], options: argparse.Namespace, results: Path) -> None:
    """Tests the mutants and adds their outcomes to the file `results`."""
    known = learned(options)
    chosen = [mutant | {"tests": tests_of(mutant, known, options)} for mutant in chosen]
    random.Random(SEED).shuffle(chosen)
    module = "recall_lab/metrics.py"
    same = {"key": UNCHANGED, "module": module, "mutated": (ROOT / module).read_text("utf-8")}
    chosen.insert(0, same | {"tests": ["tests/test_metrics.py"]})
    names = {mutant["key"]: mutant["module"] for mutant in chosen}
    batches = options.out / "batches"
    batches.mkdir(exist_ok=True)
    jobs = []
    for i in range(0, len(chosen), options.batch):
        path = (batches / f"{i}.json").resolve()
        path.write_text(json.dumps(chosen[i : i + options.batch]), "utf-8")
        jobs.append(["work", str(path), str(options.limit)])

    def receive(line: str) -> None:
        result = json.loads(line)
        with results.open("a", encoding="utf-8") as file:
            file.write(line)
        where = f"{names[result['key']]}  {result['by']}"
        print(f"{result['key']} {result['outcome']:<9}{result['seconds']:6.1f} s {where}", flush=True)

    parallel(jobs, options, receive)


def outcomes(results: Path) -> dict[str, str]:
    """Mutant → its last outcome."""
    lines = results.read_text("utf-8").splitlines() if results.exists() else []
    return {result["key"]: result["outcome"] for result in map(json.loads, lines)}


def learned(options: argparse.Namespace) -> dict[str, dict]:
    """Which tests execute which line, and how long each test takes. Test files that are not yet known are run."""
    path = options.out / "tests.jsonl"
    files = {f"tests/test_{name}.py" for tests in sources().values() for name in tests.split()}
    left = sorted(files - {file for part in parts(path) for file in part["files"]})

    def receive(line: str) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
        part = json.loads(line)
        print(f"{len(part['seconds'])} tests of {' '.join(part['files'])}; not used: {part['failed']}", flush=True)

    parallel([["learn", *left[i : i + 3]] for i in range(0, len(left), 3)], options, receive)
    found: dict[str, dict] = {"seconds": {}, "executed": {}}
    for part in parts(path):
        found["seconds"] |= part["seconds"]
        for module, lines in part["executed"].items():
            for number, names in lines.items():
                found["executed"].setdefault(module, {}).setdefault(number, []).extend(names)
    return found


def parts(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def tests_of(mutant: Mutant, known: dict[str, dict], options: argparse.Namespace) -> list[str]:
    """The tests that execute a mutant's statement, or all tests of its module where that is on import.

    Quickest first, and no more than `options.budget` seconds of them.
    """
    files = {f"tests/test_{name}.py" for name in sources()[mutant["module"]].split()}
    executed = known["executed"].get(mutant["module"], {})
    lines = () if options.all_tests else lines_of(mutant["module"], mutant["line"])
    names = {name for line in lines for name in executed.get(str(line), ())}
    names = names or {name for name in known["seconds"] if name.partition("::")[0] in files}
    chosen, total = [], 0.0
    for name in sorted(names, key=lambda name: known["seconds"][name]):
        total += known["seconds"][name]
        if total > options.budget and chosen:
            break
        chosen.append(name)
    return chosen


def parallel(jobs: list[list[str]], options: argparse.Namespace, receive: Callable[[str], None]) -> None:
    """Runs worker.py once per job, several at a time, each with a copy of the checkout to itself.

    A job is the worker's first argument and those that follow the folder of the copy. Each line that a worker prints is
    handed to `receive`.
    """
    waiting: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    ignored = shutil.ignore_patterns("outputs", "__pycache__", ".*_cache", ".hypothesis")

    def take(folder: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        worker = [*options.launcher.split(), sys.executable, str(Path(__file__).with_name("worker.py"))]
        while True:
            try:
                first, *rest = waiting.get_nowait()
            except queue.Empty:
                return
            command = [*worker, first, str(folder), *rest]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder) as process:
                for line in process.stdout:
                    receive(line)

    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / f"copy{i}" for i in range(min(options.processes, len(jobs)))]
        for folder in folders:
            shutil.copytree(ROOT, folder, ignore=ignored)
        threads = [threading.Thread(target=take, args=(folder,)) for folder in folders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def summarise(chosen: list[Mutant], outcome: dict[str, str]) -> None:
    """Prints the survivors' diffs, and drawn and killed mutants per module."""
    for mutant in chosen:
        if outcome.get(mutant["key"]) == "survived":
            print(f"\nsurvived {mutant['key']} ({mutant['operator']})\n{mutant['diff']}")
    drawn = Counter(mutant["module"] for mutant in chosen)
    killed = Counter(m["module"] for m in chosen if outcome.get(m["key"]) in ("killed", "timeout"))
    print()
    for module, count in drawn.items():
        print(f"{module:<42}{count:4} drawn{killed[module]:5} killed")
    share = sum(killed.values()) / len(chosen)
    print(f"{'all':<42}{len(chosen):4} drawn{sum(killed.values()):5} killed ({share:.1%})")


if __name__ == "__main__":
    main()

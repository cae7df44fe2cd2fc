"""The command line: `recall-lab VERB …`, also `python -m recall_lab VERB …`.

Slow imports are left to the verbs that need them.
"""

import argparse
import sys

EXAMPLES = """for example:
  recall-lab list
  recall-lab run experiment=quickstart
  recall-lab run mixer=delta_rule task.length=128 task.pairs=32
  recall-lab run -m mixer=softmax,delta_rule seed=0,1 name=mine
  recall-lab status outputs/mine
  recall-lab report outputs/mine
  recall-lab check mixer=mine task=mine --config-dir mine"""

GOLDEN = """reference arrays to compare the mixer with: an .npz of float32 or float64 arrays in the layout b h t d.
Inputs are q, k, v (after projection, convolution and norm) and every gate by its name; results are o, and if wanted
state_NAME (parts of the final state), and the gradients dq, dk, dv, dGATE for a given gradient do of o.
rms(x - ref) / rms(ref) must be at most 1e-10 in float64 and 1e-5 in float32; a float32
reference is compared in float32 only"""


def main() -> None:
    """Parses the command line and exits with the verb's status."""
    from recall_lab.files import tolerate_terminal

    tolerate_terminal()
    try:
        _main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("recall-lab: interrupted\n")
        sys.exit(130)


def _main(arguments: list[str]) -> None:
    if arguments[:1] == ["run"]:
        from recall_lab.cli import run

        sys.exit(run.main(arguments[1:]))
    chosen = parser().parse_args(_own_first(arguments))

    from recall_lab import files, messages

    try:
        if getattr(chosen, "config_dir", None) is not None:
            files.use(chosen.config_dir)
        sys.exit(_verb(chosen))
    except BrokenPipeError:
        sys.exit(0)
    except messages.ERRORS as error:
        sys.exit(messages.print_error(error))


def _own_first(arguments: list[str]) -> list[str]:
    """The arguments with --config-dir FOLDER after the verb: argparse accepts no option between settings."""
    for number, word in enumerate(arguments[:-1]):
        if word == "--config-dir":
            rest = arguments[:number] + arguments[number + 2 :]
            return [*rest[:1], word, arguments[number + 1], *rest[1:]]
    return arguments


def parser() -> argparse.ArgumentParser:
    """The verbs and their options; those of `run` are Hydra's."""
    made = argparse.ArgumentParser(
        prog="recall-lab",
        description="Find out what an attention mechanism can remember.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--config-dir", metavar="FOLDER", help="a folder with configuration and modules of your own")
    verbs = made.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, does: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=does, parents=[own])

    verbs.add_parser("run", help="train and test; a Hydra app: see `recall-lab run --help`")
    show = verb(
        "show", "print an example of a task, or what a mixer is: equation, shapes, parameters, state, a picture"
    )
    settings = "or mixer=NAME, and settings (task.length=64, mixer.heads=2, model.d_model=32), as for run"
    show.add_argument("overrides", nargs="+", metavar="task=NAME", help=settings)
    show.add_argument("--n", type=int, help="number of sequences; statistics are printed for more than one")
    show.add_argument("--seed", type=int, default=0, help="seed of the example, or of the mixer's random input")
    claim = verb("claim", "run the experiments that claims need, and judge the claims")
    claim.add_argument("words", nargs="*", metavar="NAME", help="claims (none: all), and settings: size=large, root=…")
    card = verb("card", "the memory card of a mechanism: one page on what it can remember")
    card.add_argument("words", nargs="*", metavar="mixer=NAME", help="and settings: mixer.heads=2, size=large, root=…")
    collect = "instead: write the package's table of built-in mechanisms from finished sweeps, or their table.parquet"
    card.add_argument("--collect", nargs="+", metavar="FOLDER", default=[], help=collect)
    report = verb("report", "make the table, figures and report.html of a sweep's folder again, or of several together")
    report.add_argument("folders", nargs="+", metavar="FOLDER")
    for one in (report, claim):
        one.add_argument("--csv", action="store_true", help="also write the table as table.csv and settings.csv")
    report.add_argument("--to", metavar="FOLDER", help="where to write it; of several sweeps A and B by default: A+B")
    status = verb("status", "state, progress, accuracy, time left and size of every run of a sweep")
    status.add_argument("folder")
    clean = verb("clean", "delete checkpoints or failed runs of a sweep; without a flag: print their number and size")
    clean.add_argument("folder")
    clean.add_argument("--checkpoints", action="store_true", help="delete the weights of finished runs")
    clean.add_argument("--failed", action="store_true", help="delete the folders of failed runs")
    probe = verb("probe", "run probes, or another mixer, on the models of finished runs")
    each = "measure every combination of values that is not measured yet: mixer.budget=8,16"
    probe.add_argument("-m", "--multirun", action="store_true", help=each)
    probe.add_argument("folder", help="a run's folder, or a sweep's: all of its finished runs")
    probe.add_argument("overrides", nargs="+", metavar="probe=NAME", help="and mixer=window mixer.budget=32, test.…")
    rates = verb("rates", "choose the learning rate of each mechanism of some experiments anew")
    settings = "and settings for all runs: train.steps=400 seed=0"
    rates.add_argument("words", nargs="+", metavar="EXPERIMENT", help=settings)
    check = verb("check", "check mixers and tasks, your own as well, against the contract of the built-in ones")
    check.add_argument("overrides", nargs="*", metavar="mixer=NAME", help="and task=NAME, mixer.d_key=8 …, as for run")
    check.add_argument("--golden", metavar="FILE", help=GOLDEN)
    listing = verb("list", "tasks, mixers, probes, claims, experiments and so on, one line each")
    listing.add_argument("group", nargs="?", help="one group, in full")
    return made


def _verb(chosen: argparse.Namespace) -> int:
    """Runs the verb of the command line, and returns the exit status."""
    if chosen.verb == "report":
        return _report(chosen.folders, chosen.to, chosen.csv)
    if chosen.verb == "status":
        from recall_lab.cli import status

        print(status.status(chosen.folder))
        return 0
    if chosen.verb == "clean":
        from recall_lab.cli import clean

        print(clean.clean(chosen.folder, chosen.checkpoints, chosen.failed))
        return 0
    if chosen.verb == "probe":
        from recall_lab.cli import probe

        return probe.probe(chosen.folder, chosen.overrides, chosen.config_dir, chosen.multirun)
    if chosen.verb == "claim":
        from recall_lab.cli import claim

        return claim.claim(chosen.words, chosen.config_dir, chosen.csv)
    if chosen.verb == "card":
        from recall_lab.cli import card

        if chosen.collect:
            return card.collect(chosen.collect, chosen.words)
        return card.card(chosen.words, chosen.config_dir)
    if chosen.verb == "rates":
        from recall_lab.cli import rates
        from recall_lab.cli.base import launch

        settings = [word for word in chosen.words if "=" in word]
        return rates.study([word for word in chosen.words if "=" not in word], settings, launch)
    if chosen.verb == "check":
        from recall_lab.cli import check

        return check.check(chosen.overrides, chosen.config_dir, chosen.golden)
    if chosen.verb == "list":
        from recall_lab.cli import listing

        print(listing.listing(chosen.group, chosen.config_dir))
        return 0
    from recall_lab.cli import show

    show.show(chosen.overrides, chosen.n, chosen.seed, chosen.config_dir)
    return 0


def _report(sweeps: list[str], to: str | None, csv: bool) -> int:
    import shlex
    from pathlib import Path

    from recall_lab import report

    paths = [Path(sweep) for sweep in sweeps]
    folder = report.beside(paths) if to is None else Path(to)
    if {path.resolve() for path in paths} == {folder.resolve()}:
        made = report.make(paths[0], csv=csv)
    else:
        options = [] if to is None else ["--to", to]
        made = report.make(folder, paths, shlex.join(["recall-lab", "report", *sweeps, *options]), csv)
    print(made.text)
    return 1 if made.failed else 0


if __name__ == "__main__":
    main()

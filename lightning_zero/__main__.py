"""``python -m lightning_zero``: what the package can say without training.

python -m lightning_zero config ds_config.json               # what becomes of each key of DeepSpeed's JSON
python -m lightning_zero config ds_config.json --ranks 8     # and the batch sizes on so many ranks
python -m lightning_zero checkpoint info PATH                # and verify, consolidate, export: of checkpoint folders
python -m lightning_zero plan --module package.module:Lit    # bytes and traffic at each stage, and which to use
"""

import argparse
import sys

from lightning_zero.checkpoint import commands as commands_of_checkpoints
from lightning_zero.config.deepspeed import table, translate
from lightning_zero.plan import commands as commands_of_plans
from lightning_zero.training import settings_of


def main(arguments: list[str] | None = None) -> None:
    """Run a command.

    Raises:
        SystemExit: the configuration or checkpoint cannot be used; the message says why.
    """
    parser = argparse.ArgumentParser(prog="python -m lightning_zero")
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="what becomes of each key of a DeepSpeed configuration")
    config.add_argument("path", help="the JSON file")
    config.add_argument("--ranks", type=int, help="show the batch sizes on so many ranks, too")
    commands_of_checkpoints.add_parser(commands)
    commands_of_plans.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        if options.command == "checkpoint":
            commands_of_checkpoints.run(options)
        elif options.command == "plan":
            commands_of_plans.run(options)
        else:
            _explain(options.path, options.ranks)
    except (ValueError, TypeError, OSError) as error:
        sys.exit(f"\n{error}")


def _explain(path: str, ranks: int | None) -> None:
    translation = translate(path)
    print(table(translation))  # also of one that cannot be used
    settings = settings_of({}, translation)
    print(f"\n{settings.describe()}")
    sizes = settings.training.batch(ranks) if ranks else None
    if sizes is not None:
        total, micro, steps = sizes
        print(f"On {ranks} ranks: {total} samples a step = {micro} in a batch * {steps} batches * {ranks} ranks.")
    elif ranks:
        print(f"On {ranks} ranks: batch sizes are those of DataLoader and Trainer.")


if __name__ == "__main__":
    main()

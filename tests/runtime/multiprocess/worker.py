"""One process of a run under test: `python worker.py train|predict RECIPE [key=value ...]`, as the commands do it.

Where `HEARS` names a file, it is there as soon as the process hears signals as the commands do.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from redco_cli.__main__ import hear_early


def main(command: str, target: str, overrides: Sequence[str]) -> int:
    hear_early()
    from redco_cli.console import hush, note, print_error
    from redco_cli.errors import EXIT_INTERRUPTED, RedcoError
    from redco_cli.recipe.load import find_run, load_recipe
    from redco_cli.runtime.rendezvous.join import joined

    signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
    if "HEARS" in os.environ:
        Path(f"{os.environ['HEARS']}-{os.environ['REDCO_PROCESS_ID']}").touch()
    try:
        with joined(load_recipe(find_run(target)[0], overrides), note, print_error, hush):
            from redco_cli import run

            print(run.train(target, overrides) if command == "train" else run.predict(target, overrides))
    except RedcoError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))

"""``python -m examples.demo``: the whole demonstration; every number that is printed is computed as it runs."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from examples.demo import cases, digits, forecasting, plots, statistics
from examples.demo.console import say, title


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="where the pictures go")
    output = parser.parse_args().output
    start = time.perf_counter()

    title("1. Masked statistics of a record with holes, next to pandas")
    statistics.show()
    title("2. Unmodified models on data with holes, NaN under the mask throughout")
    forecasts = forecasting.show()
    restored = digits.show()
    title("3. Masked mean, Adagrad written once, an operator of one's own")
    cases.show()
    title("4. Pictures")
    for path in plots.draw(forecasts, restored, output):
        say(str(path))
    say(f"{time.perf_counter() - start:.0f} s on {torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    main()

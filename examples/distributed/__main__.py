"""``torchrun --nproc-per-node 2 -m examples.distributed``: train, send a tenth of the gradients, stop and go on."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor, distributed

from examples.demo.data import digits_data
from examples.distributed.training import Training


def difference(one: Training, other: Training) -> float:
    """The largest difference between two models' weights."""
    return max(float((a - b).abs().max()) for a, b in zip(one.weights(), other.weights(), strict=True))


def interrupted(pixels: Tensor, steps: int) -> Training:
    """A training that stops half-way, and another that goes on from its checkpoint."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        distributed.broadcast_object_list(folder)
        before = Training(pixels)
        before.until(steps // 2)
        before.save(folder[0])
        after = Training(pixels)
        after.load(folder[0])
        distributed.barrier()  # until all have read it
    after.until(steps)
    return after


def table(whole: Training, top: Training) -> list[str]:
    """The losses of both trainings."""
    rows = ["step     loss   loss, a tenth of the gradients sent"]
    last = len(whole.losses)
    shown = [1, *range(10, last, 10), last]
    return rows + [f"{step:4d}   {whole.losses[step - 1]:.4f}   {top.losses[step - 1]:.4f}" for step in shown]


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun --nproc-per-node N -m examples.distributed", description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, help="a file for the losses and weights")
    arguments = parser.parse_args()

    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    # (Models are gone when the group ends: a last DistributedDataParallel would wait for the group's threads, and these
    # for Python's lock, which it holds.)
    train_and_tell(arguments.steps, arguments.json)
    distributed.destroy_process_group()


def train_and_tell(steps: int, file: Path | None) -> None:
    pixels = digits_data().train.flatten(1).double()
    whole, top = Training(pixels), Training(pixels, share=0.1)
    for training in (whole, top):
        training.until(steps)
    resumed = difference(whole, interrupted(pixels, steps))
    valid: list[int] = [0] * distributed.get_world_size()
    distributed.all_gather_object(valid, whole.valid)

    if distributed.get_rank() == 0:
        print(f"{len(pixels)} digits, {float(pixels.isnan().double().mean()):.0%} of the pixels missing")
        print(f"{len(valid)} processes, which had {', '.join(map(str, valid))} valid pixels to restore")
        print("\n".join(table(whole, top)))
        assert top.top is not None
        print(f"gradients sent: {top.top.sent / top.top.elements:.0%}")
        print(f"stopped, saved, loaded and gone on: weights differ by {resumed:.1e} from the undisturbed training")
        if file is not None:
            weights = [w.tolist() for w in whole.weights()]
            found = {"losses": whole.losses, "weights": weights, "resumed": resumed, "top": top.losses}
            file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

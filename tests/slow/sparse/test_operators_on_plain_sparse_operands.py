"""A plain torch.sparse operand beside masked ones, in every operator of torch's database that has two operands."""

from __future__ import annotations

import itertools

import pytest
from torch import Tensor

from op_registry.conformance.sample import Sample, chosen
from op_registry.conformance.samples import database
from parts_of_the_database import entries
from plain_sparse_operands import IN_TRANSFORMS, STORED, checked, checked_in_transform, forms

MOST = 3  # samples of an operator
# Before it calls an operator beside the masked one, torch's Python code views or converts the sparse operand, and has
# no derivative of that.
WITHOUT_DERIVATIVE = (
    "nn_functional_linear_cross_entropy_chunked",
    "nn_functional_linear_cross_entropy_chunked_none",
    "nn_functional_max_unpool1d",
    "nn_functional_max_unpool1d_grad",
    "to",
)


def samples(entry: str) -> list[Sample]:
    operator = database()[entry]
    if operator.info.name.startswith("masked.") or not operator.dtypes:
        return []  # what torch.masked leaves out of a sparse tensor is masked out, not 0
    made = operator.samples(operator.preferred_dtype)
    return chosen([s for s in made if len(s.tensors) > 1 and all(t.numel() for t in s.tensors)], MOST)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("entry", entries())
def test_a_plain_sparse_operand_means_its_dense_form(entry):
    storages = itertools.cycle(STORED)
    for sample in samples(entry):

        def call(*operands: Tensor, sample: Sample = sample) -> object:
            given = {id(t): o for t, o in zip(sample.tensors, operands, strict=True)}
            args, kwargs = sample.with_tensors(lambda t: given[id(t)])
            return sample.fn(*args, **kwargs)

        gradients = sample.differentiable and sample.dtype.is_floating_point and entry not in WITHOUT_DERIVATIVE
        for position, operand in enumerate(sample.tensors):
            for plain in forms(operand):
                for stored in ("strided", next(storages)):
                    try:
                        found = checked(call, sample.tensors, position, plain, stored, gradients)
                    except (RuntimeError, IndexError, ValueError):
                        assert stored != "strided"  # the masked operands have no such storage
                        continue
                    assert found is None, (sample.number, position, plain, stored, found)
                if gradients and plain in IN_TRANSFORMS:
                    found = checked_in_transform(call, sample.tensors, position, plain)
                    assert found is None, (sample.number, position, plain, "in a transform", found)

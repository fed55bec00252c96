"""P7: operators of every family compiled, as graphs and down to kernels, and some whole entries of the database.

``CONFORMANCE_COMPILED=1/3`` takes another third of them, ``CONFORMANCE_INDUCTOR=0/6`` compiles a sixth to kernels.
"""

from __future__ import annotations

import pytest

from op_registry.conformance.trials import Settings, run_operator
from parts_of_the_database import asked_for, failures

EAGER = "masked_dispatch.conformance_subject:eager"
# What P7 compiles: the operators that models are made of, and one or two of every family.
COMPILED = tuple(
    name
    for names in (
        "exp add mul div_no_rounding_mode where clamp pow sigmoid nn_functional_gelu nn_functional_silu masked_fill",
        "sum mean var std amax argmax prod logsumexp max_reduction_with_dim any count_nonzero linalg_vector_norm norm",
        "cumsum cummax softmax log_softmax nn_functional_layer_norm nn_functional_rms_norm nn_functional_group_norm",
        "nn_functional_batch_norm nn_functional_instance_norm nn_functional_normalize matmul bmm addmm einsum",
        "nn_functional_linear nn_functional_conv1d nn_functional_conv2d nn_functional_conv_transpose2d",
        "nn_functional_scaled_dot_product_attention nn_functional_embedding gather index_select index_put scatter_add",
        "cat stack nn_functional_pad_constant transpose reshape expand split sort topk nn_functional_mse_loss",
        "nn_functional_cross_entropy nn_functional_nll_loss nn_functional_kl_div nn_functional_avg_pool2d",
        "nn_functional_max_pool2d",
    )
    for name in names.split()
)


@pytest.mark.parametrize("entry", asked_for(COMPILED, "CONFORMANCE_COMPILED", "0/3"))
def test_compiled_is_as_eager(entry: str) -> None:
    report = run_operator(entry, Settings(subject=EAGER, laws=("P7",), modes=("aot_eager",)))
    assert not report.failures, failures(report)


@pytest.mark.parametrize("entry", asked_for(COMPILED, "CONFORMANCE_INDUCTOR", "0/30"))
def test_kernels_are_as_eager(entry: str) -> None:
    report = run_operator(entry, Settings(subject=EAGER, laws=("P7",), modes=("inductor",)))
    assert not report.failures, failures(report)


@pytest.mark.parametrize(
    ("entry", "mode"),
    [("nn_functional_bilinear", "aot_eager"), ("std_mean", "aot_eager_dynamic"), ("linalg_eig", "aot_eager")],
)
def test_entries_compile_as_they_run(entry: str, mode: str) -> None:
    report = run_operator(entry, Settings(subject=EAGER, laws=("P7",), whole_entries=True, modes=(mode,)))
    assert report.counts["P7"] == {"pass": 1}, report

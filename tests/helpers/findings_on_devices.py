"""What comparing the whole database on a device with the CPU has to find."""

from __future__ import annotations

import re

# What plain torch does not run on the device, or what it cannot be compared with, by kind.
NOT_COMPARABLE = {
    "reference": {"plain torch on reference raises": {"to_sparse"}},
    "cpp_device": {"plain torch on cpp_device raises": {"to_sparse"}},
    "meta": {
        "plain torch on meta raises": {
            *("allclose", "argwhere", "bincount", "combinations", "corrcoef", "cov", "equal", "geqrf", "histogram"),
            *("histogramdd", "istft", "linalg_lstsq", "linalg_lstsq_grad_oriented", "masked_select"),
            *("nn_functional_ctc_loss", "nn_functional_fractional_max_pool3d", "nn_functional_gaussian_nll_loss"),
            *("nn_functional_multi_margin_loss", "nn_functional_multilabel_margin_loss", "nn_functional_one_hot"),
            *("nonzero", "to_sparse", "unique", "unique_consecutive"),
        }
    },
}
# At least as many are equal to the CPU's.
EQUAL = {
    "reference": {"results": 650, "gradients": 510},
    "cpp_device": {"results": 650, "gradients": 530},
    "meta": {"results": 620, "gradients": 500},
}


def check_findings(device: str, said: str) -> None:
    for what, least in EQUAL[device].items():
        (equal,) = re.findall(rf"^{what} on {device}: (\d+) equal", said, re.MULTILINE)
        assert int(equal) >= least
    for reason, names in re.findall(r"^    ([^:]*): (.*)$", said, re.MULTILINE):
        if reason.startswith("plain torch"):
            assert set(names.split(", ")) <= NOT_COMPARABLE[device][reason]
        elif reason == "the CPU raises":
            assert all(name.startswith("jiterator") for name in names.split(", "))
        else:
            assert reason in ("no tensor of two elements to mask", "no gradient")

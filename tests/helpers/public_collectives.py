"""Every public function of torch.distributed that takes a tensor, and the checks that call it with masked ones."""

from __future__ import annotations

import inspect

from torch import distributed

# The checks, by name, that call each function with masked tensors.
TESTED = {
    "all_gather": ["all_gather"],
    "all_gather_coalesced": ["all_gather_coalesced"],
    "all_gather_into_tensor": ["all_gather_into_tensor"],
    "all_gather_object": ["objects"],
    "all_gather_single": ["all_gather_into_tensor"],
    "all_reduce": ["all_reduce SUM", "all_reduce AVG", "all_reduce MIN", "all_reduce MAX", "all_reduce PRODUCT"],
    "all_reduce_coalesced": ["all_reduce_coalesced"],
    "all_to_all": ["all_to_all"],
    "all_to_all_single": ["all_to_all_single"],
    "batch_isend_irecv": ["batch_isend_irecv"],
    "broadcast": ["broadcast"],
    "broadcast_object_list": ["objects"],
    "gather": ["gather"],
    "gather_into_tensor": ["gather_into_tensor"],
    "gather_object": ["objects"],
    "gather_single": ["gather_into_tensor"],
    "irecv": ["isend and irecv"],
    "isend": ["isend and irecv"],
    "recv": ["send and recv", "refused: recv from any rank"],
    "recv_object_list": ["objects"],
    "reduce": ["reduce"],
    "reduce_scatter": ["reduce_scatter"],
    "reduce_scatter_single": ["reduce_scatter_tensor"],
    "reduce_scatter_tensor": ["reduce_scatter_tensor"],
    "scatter": ["scatter"],
    "scatter_object_list": ["objects"],
    "send": ["send and recv"],
    "send_object_list": ["objects"],
}
# Parameters by which a function is known to take tensors, or what may contain some.
OF_TENSORS = ("tensor", "input", "output", "object", "obj", "p2p_op")


def takes_tensors(name: str) -> bool:
    function = getattr(distributed, name)
    if not inspect.isfunction(function) or not function.__module__.startswith("torch.distributed"):
        return False
    return any(
        parameter.removeprefix("scatter_").startswith(OF_TENSORS)
        for parameter in inspect.signature(function).parameters
    )


def public_functions() -> set[str]:
    """Those of the torch that is installed."""
    return {name for name in dir(distributed) if not name.startswith("_") and takes_tensors(name)}

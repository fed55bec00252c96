"""What cannot work is refused where it is registered: the error names the argument and the line of the registration.

Every word of op_registry.authoring that gives back a rule is asked, a new one too.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from op_registry import authoring, registry
from op_registry.authoring import (
    COMPOSITE,
    QUERY,
    REDUCTION,
    Equation,
    Slices,
    Sparse,
    elementwise,
    masked_rule,
    on_call,
    over_slices,
    reduction,
    scan,
)
from op_registry.dimensions.slices import LastDims
from op_registry.rule import Category

pytestmark = pytest.mark.usefixtures("rules_forgotten")

LIBRARY = torch.library.Library("registration", "DEF")
for schema, body in (
    ("twice(Tensor x) -> Tensor", lambda x: x * 2),
    ("rsum(Tensor x, int d) -> Tensor", lambda x, d: x.sum(d)),
    ("running(Tensor x, int d) -> Tensor", lambda x, d: x.cumsum(d)),
    ("kept(Tensor x, int d, bool keep_it=False) -> Tensor", lambda x, d, keep_it=False: x.sum(d, keep_it)),
    ("powers(Tensor x, int p) -> Tensor", lambda x, p: x.pow(p).sum()),
    ("written(Tensor(a!) x) -> ()", lambda x: None),
    ("added(Tensor(a!) x, Tensor(b!) y) -> ()", lambda x, y: None),
    ("made(int n) -> Tensor", lambda n: torch.ones(n)),
    ("scaled(Tensor x, Tensor? scale=None, int dim=-1) -> Tensor", lambda x, scale=None, dim=-1: x.sum(dim)),
    ("weighted(Tensor x, Tensor weight, int dim) -> Tensor", lambda x, weight, dim: (x * weight).sum(dim)),
):
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], body, "CompositeExplicitAutograd")
OWN = torch.ops.registration


def words() -> dict[str, Callable[..., Any]]:
    """The functions of the authors' vocabulary that register a rule: those that return one or a decorator."""
    found = {name: getattr(authoring, name) for name in authoring.__all__}
    return {
        name: word
        for name, word in found.items()
        if inspect.isfunction(word)
        and re.search(r"Rule\]?$", str(inspect.signature(word).return_annotation))
        and "op" not in list(inspect.signature(word).parameters)[:1]
    }


WORDS = words()
# What a word needs to register OWN.twice.
NEEDED: dict[str, dict[str, Any]] = {
    "reduction": {"identity": 0},
    "scan": {"identity": 0},
    "refused": {"reason": "of this", "instead": "Call that"},
    "masked_rule": {"category": authoring.ELEMENTWISE},
    "masked_slices": {"category": authoring.REDUCTION},
    "over_slices": {"category": authoring.REDUCTION, "dims": Slices()},
    "inside": {"category": authoring.ELEMENTWISE},
}


def body(*args: Any) -> Any:
    """A rule's function for any operator."""
    return args[0]


def register(word: str, operator: Any, run: Callable[..., Any] = body, **changes: Any) -> Any:
    """Register an operator by a word, and for a decorator a function."""
    given = NEEDED.get(word, {}) | changes
    operands = (torch.nn.functional.kl_div, operator) if word == "inside" else (operator,)
    made = WORDS[word](*operands, **given)
    return made(run) if inspect.isfunction(made) else made


def test_every_word_that_registers_is_asked() -> None:
    assert {"elementwise", "reduction", "scan", "movement", "contraction", "opaque", "refused"} < set(WORDS)
    assert {"masked_rule", "masked_slices", "whole_slices", "inside"} < set(WORDS)
    assert set(NEEDED) <= set(WORDS)


@pytest.mark.parametrize("word", sorted(WORDS))
def test_what_a_word_needs_is_all_that_it_needs(word: str) -> None:
    operator = OWN.twice.default if word == "inside" else OWN.twice
    rule = register(word, operator)
    try:
        assert rule.ops == (OWN.twice.default,)
        assert rule.where.partition(":")[0].endswith("testing/test_registration.py")
    finally:
        if word == "inside":
            registry.remove_inside(rule)


# A misuse: what is passed in place of OWN.twice, what is added, and what the error must name.
MISUSES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a misspelt trait": (OWN.twice.default, {"dim": 3}, "dim"),
    "a trait of nothing": (OWN.twice.default, {"colour": "red"}, "colour"),
    "a trait of another kind": (OWN.twice.default, {"dims": 3}, "dims"),
    "an equation of other operands": (OWN.twice.default, {"dims": Equation("mk,kn->mn")}, "dims"),
    "last dimensions of no argument": (OWN.twice.default, {"dims": LastDims("shape")}, "dims"),
    "an unknown category": (OWN.twice.default, {"category": "reducton"}, "category"),
    "a category by name": (OWN.twice.default, {"category": "reduction"}, "category"),
    "an operator that writes": (OWN.written.default, {}, "registration.written"),
    "one that writes twice": (OWN.added, {}, "registration.added"),
    "an operator of no tensor": (OWN.made.default, {}, "registration.made"),
    "a function": (torch.softmax, {}, "softmax"),
    "a number": (3, {}, "3"),
    "nothing": (None, {}, "None"),
    "a library": (OWN, {}, "registration"),
    "an operator's name": ("registration.twice", {}, "torch.ops.registration.twice"),
    "a string that names nothing": ("registration.nothing", {}, "registration.nothing"),
    "a word": ("twice", {}, "twice"),
}
# The words that read the names of arguments, with operators that have others.
OTHER_NAMES: dict[str, list[tuple[Any, dict[str, Any], str]]] = {
    "reduction": [(OWN.rsum, {}, "d"), (OWN.kept, {}, "d"), (OWN.kept, {"dims": Slices(dim="d")}, "keep_it")],
    "scan": [(OWN.running, {}, "d")],
    "whole_slices": [(OWN.twice, {"dims": Slices("each", dim="dims")}, "dim='dims'")],
    "masked_rule": [(OWN.rsum, {"category": REDUCTION, "run": lambda x: x}, "d")],
    "masked_slices": [
        (OWN.rsum, {"category": REDUCTION, "run": lambda op, x: x}, "d"),
        (OWN.rsum, {"category": REDUCTION, "dims": Slices(dim="dims")}, "dim='dims'"),
    ],
    "over_slices": [
        (OWN.rsum, {}, "d"),
        (OWN.rsum, {"dims": Slices(dim="d"), "run": lambda op, x: x}, "the slices"),
    ],
    "inside": [(OWN.rsum.default, {"run": lambda x: x}, "d")],
}


@pytest.mark.parametrize(
    ("word", "misuse", "operator", "changes", "named"),
    [
        *(
            (word, misuse, *MISUSES[misuse])
            for word, misuse in itertools.product(sorted(WORDS), MISUSES)
            if word != "refused" or "write" not in misuse  # what writes may be refused
        ),
        *((word, "other names", *misuse) for word, misuses in OTHER_NAMES.items() for misuse in misuses),
    ],
)
def test_a_misuse_is_refused_where_it_is_written(
    word: str, misuse: str, operator: Any, changes: dict[str, Any], named: str
) -> None:
    before = len(registry)
    with pytest.raises((TypeError, ValueError)) as caught:
        register(word, operator, **changes)
    assert type(caught.value) is (ValueError if misuse == "an operator of no tensor" else TypeError)
    assert named in str(caught.value)
    takes_traits = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(WORDS[word]).parameters.values())
    if takes_traits or not set(changes) - {"category", "run"}:  # else Python itself refuses the keyword
        assert re.match(rf"{word} at \S*testing/test_registration\.py:\d+: ", str(caught.value)), caught.value
    assert len(registry) == before


CATEGORIES = {name: value for name, value in vars(authoring).items() if isinstance(value, Category)}


@pytest.mark.parametrize("name", sorted(CATEGORIES))
def test_a_rule_of_what_writes_needs_a_category_that_may(name: str) -> None:
    """COMPOSITE, whose rules get the tensors themselves; and those of torch's operators that also write statistics."""
    category = CATEGORIES[name]
    assert category.may_write == (name in ("ASSIGNMENT", "COMPOSITE", "NORMALIZATION", "QUERY", "REFUSED"))
    if category.may_write:
        assert masked_rule(OWN.written, category=category)(body).ops == (OWN.written.default,)
        return
    with pytest.raises(TypeError, match=r"registration\.written writes to x, and a law says what a result is"):
        masked_rule(OWN.written, category=category)


def test_the_line_is_that_of_the_registration() -> None:
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.raises(TypeError, match=r"^elementwise at \S*testing/test_registration\.py:\d+: ") as caught:
        elementwise(OWN.twice, slice=3)
    assert f".py:{line}: " in str(caught.value)


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (
            lambda: reduction(OWN.twice, identity=0, dim=3),
            "reduction has no trait dim; did you mean dims? It takes identity, mixed_derivative, dims, plain, ",
        ),
        (
            lambda: elementwise(OWN.twice, identity=0),
            "elementwise reads no trait identity. It takes derivative, neutral, keeps_zero, traps, dims, ",
        ),
        (
            lambda: masked_rule(OWN.twice, category=REDUCTION, dims=Equation("mk,kn->mn")),
            "dims='mk,kn->mn' has 2 operands, and the operator's tensors are x (torch.ops.registration.twice)",
        ),
        (
            lambda: masked_rule(OWN.powers, category=REDUCTION, dims=LastDims("shape")),
            "dims=LastDims('shape'): the operator has no shape; its arguments are x, p "
            "(torch.ops.registration.powers)",
        ),
        (
            lambda: masked_rule(OWN.twice, category=QUERY, torch_if_valid=True),
            "torch_if_valid=True is for operators whose results have masks",
        ),
        (lambda: elementwise(OWN.twice, derivative="linea"), "derivative='linea' is not one of 'linear', 'bilinear', "),
        (lambda: reduction(OWN.twice, identity="0"), "identity='0' is not a number, or a function of the dtype"),
        (
            lambda: masked_rule(OWN.twice, category="reduction"),
            "category='reduction' is no category: pass the value op_registry.authoring.REDUCTION",
        ),
        (lambda: masked_rule(OWN.twice, category="reducton"), "pass the value op_registry.authoring.REDUCTION"),
        (lambda: masked_rule(OWN.twice, category="sum"), "category='sum' is no category; there are ELEMENTWISE,"),
        (
            lambda: reduction(OWN.rsum, identity=0),
            "the arguments of torch.ops.registration.rsum are x, d; none is called dim, which reduction reads for the "
            "dimensions of a slice. If d says which they are, add dims=Slices(dim='d'); if the whole tensor is one "
            "slice, dims=Slices(dim=None)",
        ),
        (lambda: scan(OWN.running, identity=0), "If d says which they are, add dims=Slices('each', dim='d'); if"),
        (
            lambda: reduction(OWN.kept, identity=0, dims=Slices(dim="d")),
            "none is called keepdim, which reduction reads for whether reduced dimensions are kept. If keep_it says "
            "so, add dims=Slices(dim='d', keepdim='keep_it')",
        ),
        (
            lambda: elementwise("registration.twice"),
            "'registration.twice' is no operator of torch's dispatcher, which rules belong to: pass "
            "torch.ops.registration.twice",
        ),
        (lambda: elementwise(torch.softmax), "which rules belong to: pass torch.ops.aten.softmax"),
        (lambda: elementwise(), "it needs an operator: torch.ops.mylib.f for an operator mylib::f"),
        (lambda: masked_rule(OWN.rsum, category=REDUCTION)(3), "3 is no function, which a rule has to be"),
        (
            lambda: masked_rule(OWN.rsum, category=REDUCTION)(len_of_one),
            "len_of_one(x: 'Any') -> 'int' cannot be called with the arguments of torch.ops.registration.rsum: x, d",
        ),
        (
            lambda: over_slices(OWN.rsum, category=REDUCTION, dims=Slices(dim="d"))(len_of_one),
            "len_of_one(x: 'Any') -> 'int' cannot be called with what a body gets for "
            "torch.ops.registration.rsum: the overload, the slices, x",
        ),
        (
            lambda: over_slices(OWN.twice, category=REDUCTION, dims=Equation("k->k")),
            "dims=Equation(...) states no slices, as Slices(...) and LastDims(...) do",
        ),
        (
            lambda: over_slices(OWN.weighted, category=REDUCTION, dims=Slices())(len_of_one),
            "dims=Slices(...) states the dimensions of the first tensor alone, and torch.ops.registration.weighted "
            "also takes the tensor weight. If weight is a parameter for the last dimensions, as a norm's weight, state "
            "dims=LastDims(...); if it goes with the first tensor element by element, write the rule with operators: "
            "@masked_rule(torch.ops.registration.weighted, category=COMPOSITE)",
        ),
        (
            lambda: masked_rule(OWN.rsum, category=REDUCTION, unchanged=lambda: True)(lambda x, d: x),
            "<lambda>() cannot be called with what stands behind the first argument of torch.ops.registration.rsum: d",
        ),
        (
            lambda: elementwise(OWN.twice).lowering(Sparse)(on_call(sparse="y")(len_of_one)),
            "on_call names y, and the arguments of registration.twice.default are x",
        ),
        (
            lambda: elementwise(OWN.twice).lowering(Sparse)(len_of_one),
            "len_of_one(x: 'Any') -> 'int' cannot be called with what a lowering of registration.twice.default gets: "
            "the overload, x. With @on_call, it gets the call as its one argument",
        ),
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_write(register: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        register()
    assert said in str(caught.value)


def len_of_one(x: Any) -> int:
    return len(x)


# ------------------------------------------------------------------------------------------- following the advice works


def test_an_optional_tensor_and_a_decorated_lowering_are_taken() -> None:
    over_slices(OWN.scaled, category=REDUCTION, dims=Slices())(lambda op, over, x, scale=None: over.sum(x.filled(0)))
    assert OWN.scaled(md.masked_tensor([1.0, 2.0], [True, False])).item() == 1.0

    def with_overload(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(function)(lambda op, *args: function(*args))

    elementwise(OWN.twice).lowering(Sparse)(with_overload(lambda x: x))


def test_dimensions_of_another_name_are_mapped() -> None:
    reduction(OWN.kept, identity=0, dims=Slices(dim="d", keepdim="keep_it"))
    scan(OWN.running, identity=0, dims=Slices("each", dim="d"))
    reduction(OWN.powers, identity=0, dims=Slices(dim=None))
    x = md.masked_tensor(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [False, False]]))
    for stored in (x, x.to_sparse_csr(), x.to_sparse_csr().mT):
        for d in (0, 1):
            for keep_it in (False, True):
                want = stored.to_dense().sum(d, keepdim=keep_it)
                assert torch.equal(OWN.kept(stored, d, keep_it).to_dense(), want)
            assert torch.equal(OWN.running(stored, d).to_dense(), stored.to_dense().cumsum(d))
        assert OWN.powers(stored, 2).item() == 1.0


def test_an_operator_that_writes_follows_a_rule_of_its_tensors() -> None:
    x = md.masked_tensor([1.0, 2.0], [True, False])
    with pytest.raises(md.MaskedSemanticsError) as caught:
        OWN.written(x)
    assert "@masked_rule(torch.ops.registration.written, category=COMPOSITE)\n    def written(x): ..." in str(
        caught.value
    )

    @masked_rule(OWN.written, category=COMPOSITE)
    def written(x: Tensor) -> None:
        x.mul_(2)

    assert OWN.written(x) is None
    assert repr(x) == "masked_tensor([2., --], valid=1/2, True=valid)"


def test_an_operator_that_writes_follows_the_rule_of_one_that_does_not() -> None:
    x = md.masked_tensor([1.0, 2.0], [True, False])
    LIBRARY.define("filled(Tensor(a!) x) -> ()")
    LIBRARY.impl("filled", lambda x: x.copy_(x * 2) is None, "CompositeExplicitAutograd")
    with pytest.raises(md.MaskedSemanticsError, match=r"Or define an operator registration::filled_functional that"):
        OWN.filled(x)
    LIBRARY.define("filled_functional(Tensor x) -> Tensor")
    LIBRARY.impl("filled_functional", lambda x: x * 2, "CompositeExplicitAutograd")
    with pytest.raises(TypeError, match=r"Or register torch\.ops\.registration\.filled_functional, by whose rule"):
        elementwise(OWN.filled)
    elementwise(OWN.filled_functional)
    OWN.filled(x)
    assert repr(x) == "masked_tensor([2., --], valid=1/2, True=valid)"

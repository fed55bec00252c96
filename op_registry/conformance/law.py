"""A law as a value, and a case of it: what is tested, on which subject, and how it is repeated.

The cases of most laws are trials: calls of an operator's samples under masks, on dense storage, in other storages, or
in other modes (trials.py). A law about something else brings cases of its own: ragged batches (P9), statements of
dimensions, calls on which torch raises.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from op_registry.conformance.masks import DESCRIPTIONS, STORED
from op_registry.conformance.oracles.call import Misdeclared, OracleFailed
from op_registry.conformance.sample import Operator
from op_registry.conformance.subject import Subject
from op_registry.conformance.trial import (
    Broken,
    Densified,
    NotAsked,
    Refusal,
    RefusedRightly,
    Trial,
    refused_by_the_semantics,
)
from op_registry.errors import MaskedSemanticsError
from op_registry.rule import IN_A_RULE

if TYPE_CHECKING:
    from op_registry.conformance.trials import Settings

# The outcomes of a case, best first. "refused" breaks no law, but tests none either; "refused rightly" is a refusal
# that the semantics require.
Status = Literal["pass", "densified", "refused rightly", "not asked", "refused", "gap", "broken", "error"]
# A command-line option that selects one check of a law: its name and value.
Option = tuple[str, str]
Check = Callable[[Trial], None]
# A check on another storage, or in another mode, by name.
CheckIn = Callable[[Trial, str], None]
# Why a law does not apply to an operator, or None: given a seed, and why trials had nothing to ask, with their number
# (None before there are any).
Exemption = Callable[[Operator, int, "Mapping[str, int] | None"], "str | None"]


@dataclass(frozen=True)
class Case:
    """One test of a law.

    description  the words by which gaps select it
    run          returns if the law holds, and otherwise raises Broken, NotAsked, or whatever the subject raised
    option       the option that selects the storage or the mode
    repeat       the options of `check` that select it among the law's other cases
    trial        the call that it tests, if it is one under masks
    asked_of     the overload whose rule it tests, for a law that is asked of rules
    plain_raises whether it tests a call that plain torch refuses
    known        what comes of it, of a case that has been asked together with others
    """

    description: str
    run: Callable[[], None] = lambda: None
    option: Option | None = None
    repeat: str = ""
    trial: Trial | None = None
    asked_of: str = ""
    plain_raises: bool = False
    known: tuple[Status, str] | None = None

    def outcome(self) -> tuple[Status, str]:
        """The status, and its message."""
        if self.known is not None:
            return self.known
        if self.trial is None:
            return status_of(self.run)
        return outcome_of(lambda trial: self.run(), self.trial, self.plain_raises)


Cases = Callable[[Operator, Subject, "Settings"], Iterator[Case]]


@dataclass(frozen=True)
class Law:
    """A law.

    words         what it says, in a verdict
    check         tests a trial on dense storage
    stored        tests one on another storage
    in_mode       tests one in another mode
    masks         the kinds of masks of its trials
    masks_stored  the same on storages other than dense
    whole         the same for an operator that refuses partly valid input
    one_hole      whether each operator has a trial with one hole in each tensor, not only those of whole slices
    of_gradients  whether trials are made in float64, of operators that have a derivative
    exempt        why it does not apply to an operator
    cases         its cases, if they are no trials
    also          further cases beside its trials
    of_rules      whether it is asked of each rule that a call needs; then refusals are told
    of_plain      whether it is asked of plain torch, whatever the subject
    of_devices    whether it compares a device with the CPU; then it is asked where a device is named, and no other law
    """

    name: str
    words: str
    check: Check | None = None
    stored: CheckIn | None = None
    in_mode: CheckIn | None = None
    masks: tuple[str, ...] = tuple(DESCRIPTIONS)
    masks_stored: tuple[str, ...] = STORED
    whole: tuple[str, ...] = ()
    one_hole: bool = False
    of_gradients: bool = False
    exempt: Exemption | None = None
    cases: Cases | None = None
    also: Cases | None = None
    of_rules: bool = False
    of_plain: bool = False
    of_devices: bool = False


def outcome_of(check: Check, trial: Trial, plain_raises: bool = False) -> tuple[Status, str]:
    """The status of a trial, and its message; a call that plain torch cannot make is not asked."""
    if trial.plain_error is not None and not plain_raises:
        return "not asked", f"plain torch raises {trial.plain_error}"
    outcome = status_of(functools.partial(check, trial), functools.partial(refused_by_the_semantics, trial))
    why = trial.subject.excuse(trial.sample) if outcome[0] in ("broken", "error") else None
    return outcome if why is None else ("not asked", why)


def status_of(run: Callable[[], None], has_no_result: Callable[[], bool] = lambda: False) -> tuple[Status, str]:
    """The status of a trial that `run` makes, and its message; `has_no_result` says whether the semantics refuse it."""
    try:
        run()
    except NotAsked as reason:
        return "not asked", str(reason)
    except Densified as reason:
        return "densified", str(reason)
    except RefusedRightly as reason:
        return "refused rightly", str(reason)
    except (Broken, Misdeclared) as reason:
        return "broken", str(reason)
    except OracleFailed as reason:
        return "error", f"not the rule, but {reason}"
    except (Refusal, MaskedSemanticsError) as reason:
        if has_no_result():
            return "not asked", f"refused, as the semantics require: {_first_line(reason)}"
        return "refused", _first_line(reason)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
        rule = str(error).partition(IN_A_RULE)[2]
        named = f"{IN_A_RULE.strip()} {rule}: " if rule else ""
        return "error", f"{named}{type(error).__name__}: {_first_line(error)}{where}"
    return "pass", ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]

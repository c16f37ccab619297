"""What the mask of a model is, as data: the block ``violin`` of a model's JSON description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any

from . import curves as curve_module
from . import ops
from .errors import Error, numbers

INITS = ("pretrain", "finetune", "none", "spread", "identity")
PARAMETERISATIONS = ("auto", "sigmoid", "rate")
#: Strategies that add alpha M to something: only alpha = 0 changes nothing.
ADDING = ("mul_v2", "add_v1", "add_after_sm")
#: Strategies that add to logits, of which a softmax sees differences alone: without a curve M is 1 everywhere.
SHIFTING = ("add_v1", "log")


@dataclass(frozen=True)
class MaskConfig:
    """The mask of a model, as in the block ``violin`` of a model's JSON description.

    init: ``pretrain`` beta ~ U[5,9], alpha ~ N(0,0.5), as published for training from scratch; ``finetune`` beta ~ U[15,20],
    alpha ~ N(1,0.02), as published for trained weights; ``none`` beta, alpha ~ N(0,0.5), the published ablation; ``spread``
    a decay length per head between four patches and the whole grid, alpha 1; ``identity`` the model computes what it
    computed without a mask, and the mask still receives gradients (with ``add_v1``, alpha is 0 and decays are those of
    ``spread``).

    parameterisation: ``sigmoid`` has gamma = sigmoid(beta); ``rate`` has log gamma = -max(rate,0)/n with n the longest
    distance along the curve on the model's own grid, and passes the gradient through the bound; ``auto`` is ``rate`` for
    ``identity``, which sigmoid reaches nowhere, and ``sigmoid`` otherwise. A fixed ``decay`` has none.
    """

    curves: curve_module.Curves = "violin"  #: a set, a comma-separated list or names; empty: no decay, alpha alone
    strategy: str = "mul_v1"
    decay: float | None = None  #: a fixed gamma; None: learned
    #: manhattan: a decay per row and column distance instead of one for both; other curves compute the same with it
    decay_per_axis: bool = False
    alpha: bool = True
    curve_weights: bool = False  #: learned weights of the curves instead of their mean
    prefix_decay: str = "one"  #: gamma of class token and registers: ``one`` or ``learned``
    init: str = "pretrain"
    parameterisation: str = "auto"
    blocks: Sequence[int] | None = None  #: which blocks have a mask; None: all
    heads: Sequence[int] | None = None  #: which heads; None: all

    def __post_init__(self) -> None:
        self._check()
        if self.decay is not None:
            object.__setattr__(self, "decay", float(self.decay))
        if not isinstance(self.curves, str):
            object.__setattr__(self, "curves", tuple(self.curves))
        for name in ("blocks", "heads"):
            value = getattr(self, name)
            if value is not None:
                chosen = tuple(sorted(numbers(name, value)))
                if len(set(chosen)) != len(chosen) or not chosen:
                    raise Error(f"{name} is {list(chosen)}; expected numbers, each once, or None for all")
                object.__setattr__(self, name, chosen)

    def _check(self) -> None:
        def one_of(field: str, choices: Sequence[str]) -> None:
            value = getattr(self, field)
            if value not in choices:
                raise Error(f"{field} is {value!r}; expected one of {', '.join(choices)}")

        ops.check_strategy(self.strategy)
        one_of("init", INITS)
        one_of("parameterisation", PARAMETERISATIONS)
        one_of("prefix_decay", ("one", "learned"))
        for field in ("decay_per_axis", "alpha", "curve_weights"):
            if not isinstance(getattr(self, field), bool):
                raise Error(f"{field} is {getattr(self, field)!r}; expected True or False")
        number = isinstance(self.decay, Real) and not isinstance(self.decay, bool)
        if self.decay is not None and not (number and 0 < self.decay <= 1):
            raise Error(f"decay is {self.decay!r}; expected None (learned) or a number above 0 and at most 1")
        if not self.names:
            if not self.alpha:
                raise Error("curves are empty; expected at least one curve, or alpha=True")
            for field in ("decay", "decay_per_axis", "curve_weights", "prefix_decay"):
                value, without = getattr(self, field), getattr(MaskConfig, field)
                if value != without:
                    raise Error(f"{field} is {value!r}; expected {without!r} where there is no curve")
        if self.init != "identity":
            return
        if self.parameterisation == "sigmoid":
            raise Error(
                "parameterisation is 'sigmoid'; expected 'rate' (or 'auto') for init 'identity': sigmoid(beta) is 1 for no beta"
            )
        if self.decay not in (None, 1):
            raise Error(f"decay is {self.decay}; expected None (learned) or 1 for init 'identity'")
        if self.strategy in ADDING and not self.alpha:
            raise Error(f"alpha is False; expected True for init 'identity' with strategy {self.strategy}")

    def check_fresh(self) -> None:
        """For a mask that begins with its initial values; of one that was trained they say nothing."""
        if self.init == "identity" and not self.names and self.strategy in SHIFTING:
            raise Error(
                f"strategy is {self.strategy!r}; expected another for init 'identity' where there is no curve: it adds "
                "the same to all logits of a row, and alpha would receive no gradient"
            )

    @property
    def names(self) -> list[str]:
        """The curves one by one."""
        return curve_module.names(self.curves)

    @property
    def uses_rate(self) -> bool:
        return self.parameterisation == "rate" or (self.parameterisation == "auto" and self.init == "identity")

    def covers(self, block: int) -> bool:
        return self.blocks is None or block in self.blocks

    def to_json(self) -> dict[str, Any]:
        """The block ``violin`` of a model's JSON."""
        out = asdict(self)
        out["curves"] = self.curves if self.curves in curve_module.SETS else self.names
        out["decay"] = "learned" if self.decay is None else self.decay
        out["parameterisation"] = "rate" if self.uses_rate else "sigmoid"
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in out.items() if value is not None
        }

    @classmethod
    def from_json(cls, block: dict[str, Any]) -> MaskConfig:
        if not isinstance(block, dict):
            raise Error(f"violin is {block!r}; expected an object with the fields of a mask")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(block) - known)
        if unknown:
            raise Error(f"violin.{unknown[0]} is not a field of a mask; there are {', '.join(sorted(known))}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in block.items()}
        for name in ("blocks", "heads"):
            values[name] = None if values.get(name) == () else values.get(name)  # an empty list is all of them
        if values.get("decay") == "learned":
            values["decay"] = None
        return cls(**values)

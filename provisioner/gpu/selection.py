"""Which repacks a stage compares, as the child takes them. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from provisioner.marlin import cases as marlin
from provisioner.marlin.layout import Activation, Layout, Packing, all_layouts


class Selection(StrEnum):
    """How many: one small weight of each layout, those and some real ones, many small ones, all, one beyond 2 GiB."""

    SMOKE = "smoke"
    QUICK = "quick"
    SMALL = "small"
    ALL = "all"
    LARGE = "large"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One repack: words of ``shape`` that claim to hold ``size_k`` x ``size_n`` values of ``bits`` bits.

    ``packing`` is gptq or awq, ``narrow`` means 8-bit activations. ``lenient``: the compiled op is known to take it,
    wrongly, where the fallback refuses.
    """

    name: str
    packing: str
    bits: int
    narrow: bool
    size_k: int
    size_n: int
    shape: tuple[int, int]
    act_order: bool = False
    lenient: bool = False


_SMOKE_SHAPE = (160, 256)
# Of a model's weights, those that bring most in least time: the largest, the deepest, four bits, AWQ, and act-order.
_QUICK_MODEL = (
    marlin.Case(layout=Layout(bits=8), size_k=5120, size_n=34816),
    marlin.Case(layout=Layout(bits=8), size_k=17408, size_n=5120),
    marlin.Case(layout=Layout(bits=4), size_k=5120, size_n=34816),
    marlin.Case(layout=Layout(bits=4, packing=Packing.AWQ), size_k=17408, size_n=5120),
    marlin.Case(layout=Layout(bits=8), size_k=6144, size_n=5120, act_order=True),
)


def select_cases(selection: Selection) -> tuple[Case, ...]:
    """The cases of a selection, small ones first."""
    refusals = tuple(map(_convert_refusal, marlin.refusals()))
    match selection:
        case Selection.SMOKE:
            return (*_convert(_smoke_cases()), refusals[0])
        case Selection.QUICK:
            return (*_convert((*_smoke_cases(), *_QUICK_MODEL)), *refusals)
        case Selection.SMALL:
            return (*_convert(marlin.small_cases()), *refusals)
        case Selection.ALL:
            return (*_convert((*marlin.small_cases(), *marlin.model_cases())), *refusals)
        case Selection.LARGE:
            return _convert(marlin.huge_cases())
        case _:
            assert_never(selection)


def _smoke_cases() -> tuple[marlin.Case, ...]:
    size_k, size_n = _SMOKE_SHAPE
    return tuple(
        case
        for layout in all_layouts()
        for case in marlin.with_act_order(marlin.Case(layout=layout, size_k=size_k, size_n=size_n))
    )


def _convert(cases: tuple[marlin.Case, ...]) -> tuple[Case, ...]:
    return tuple(
        Case(
            name=case.name,
            packing=str(case.layout.packing),
            bits=case.layout.bits,
            narrow=case.layout.activation is Activation.NARROW,
            size_k=case.size_k,
            size_n=case.size_n,
            shape=case.layout.packed_shape(case.size_k, case.size_n),
            act_order=case.act_order,
        )
        for case in cases
    )


def _convert_refusal(refusal: marlin.Refusal) -> Case:
    return Case(
        name=refusal.name,
        packing=str(refusal.packing),
        bits=refusal.bits,
        narrow=refusal.activation is Activation.NARROW,
        size_k=refusal.size_k,
        size_n=refusal.size_n,
        shape=refusal.shape,
        act_order=refusal.act_order,
        lenient=not refusal.by_op,
    )

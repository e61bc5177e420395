"""The report as JUnit XML: a suite a build, a case a patch; then a suite a bisection, a case a patch that turned."""

from collections.abc import Sequence
from xml.etree import ElementTree

from provisioner.documents.recipe import DriftResponse
from provisioner.drift.model import Bisection, Cell, Column, DriftReport, Row
from provisioner.drift.reports.text import describe_turn


def print_junit(report: DriftReport) -> str:
    """The whole report as JUnit XML."""
    root = ElementTree.Element("testsuites", name="provision drift", tests=str(_count(report)))
    rows = report.rows
    for column in report.columns:
        root.append(_suite(column, [row for row in rows if column.look_up(row) is None]))
    for found in report.bisections:
        root.append(_bisection(found))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _count(report: DriftReport) -> int:
    judged = sum(len(column.cells) + (column.failure is not None) for column in report.columns)
    return judged + len(report.not_judged) + sum(len(found.turns) for found in report.bisections)


def _suite(column: Column, holes: Sequence[Row]) -> ElementTree.Element:
    failures = sum(cell.response is DriftResponse.FAIL for cell in column.cells)
    suite = ElementTree.Element(
        "testsuite",
        name=column.build.label,
        tests=str(len(column.cells) + (column.failure is not None) + len(holes)),
        failures=str(failures),
        errors=str(int(column.failure is not None)),
        skipped=str(len(holes)),
    )
    for cell in column.cells:
        suite.append(_case(column, cell))
    if column.failure is not None:
        case = ElementTree.SubElement(suite, "testcase", classname=column.build.label, name="read the wheel")
        ElementTree.SubElement(case, "error", message=column.failure)
    for recipe, patch in holes:
        case = ElementTree.SubElement(suite, "testcase", classname=f"{column.build.label}.{recipe}", name=patch)
        ElementTree.SubElement(case, "skipped", message="not judged")
    return suite


def _bisection(found: Bisection) -> ElementTree.Element:
    name, count = f"{found.good.label} to {found.bad.label}", str(len(found.turns))
    suite = ElementTree.Element("testsuite", name=name, tests=count, failures=count, errors="0", skipped="0")
    for turn in found.turns:
        case = ElementTree.SubElement(suite, "testcase", classname=f"{name}.{turn.recipe}", name=turn.patch)
        ElementTree.SubElement(case, "failure", message=describe_turn(turn)).text = "\n".join(turn.after.account)
    return suite


def _case(column: Column, cell: Cell) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=f"{column.build.label}.{cell.recipe}", name=cell.verdict.id)
    text = "\n".join([f"key {cell.key}", *cell.account])
    if cell.response is DriftResponse.FAIL:
        ElementTree.SubElement(case, "failure", message=str(cell.verdict.verdict)).text = text
    elif cell.response is not DriftResponse.IGNORE:
        ElementTree.SubElement(case, "system-out").text = f"{cell.verdict.verdict}\n{text}"
    return case

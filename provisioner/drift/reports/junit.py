"""The report as JUnit XML: a suite a build, a case a patch."""

from xml.etree import ElementTree

from provisioner.drift.model import Cell, Column, DriftReport
from provisioner.recipe import DriftResponse


def print_junit(report: DriftReport) -> str:
    """The whole report as JUnit XML."""
    root = ElementTree.Element("testsuites", name="provision drift", tests=str(_count(report)))
    for column in report.columns:
        root.append(_suite(column))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _count(report: DriftReport) -> int:
    return sum(len(column.cells) or 1 for column in report.columns)


def _suite(column: Column) -> ElementTree.Element:
    failures = sum(cell.response is DriftResponse.FAIL for cell in column.cells)
    suite = ElementTree.Element(
        "testsuite",
        name=column.build.label,
        tests=str(len(column.cells) or 1),
        failures=str(failures),
        errors=str(int(column.failure is not None)),
    )
    for cell in column.cells:
        suite.append(_case(column, cell))
    if column.failure is not None:
        case = ElementTree.SubElement(suite, "testcase", classname=column.build.label, name="read the wheel")
        ElementTree.SubElement(case, "error", message=column.failure)
    return suite


def _case(column: Column, cell: Cell) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=f"{column.build.label}.{cell.recipe}", name=cell.verdict.id)
    text = "\n".join([f"key {cell.key}", *cell.account])
    if cell.response is DriftResponse.FAIL:
        ElementTree.SubElement(case, "failure", message=str(cell.verdict.verdict)).text = text
    elif cell.response is not DriftResponse.IGNORE:
        ElementTree.SubElement(case, "system-out").text = f"{cell.verdict.verdict}\n{text}"
    return case

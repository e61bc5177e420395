"""Names that a Python file uses and binds nowhere: what a merge of lines cannot see. Pure."""

import builtins
import symtable
from collections.abc import Iterator

_MODULE_NAMES = frozenset({*dir(builtins), "__class__", "__file__", "__path__", "__builtins__", "__annotations__"})


def find_unbound(source: bytes, path: str) -> frozenset[str]:
    """The names that the module ``source`` looks up and that neither it nor Python's builtins bind.

    Names that a star import may bind count as bound. Raises SyntaxError where ``source`` is no Python.
    """
    top = symtable.symtable(source.decode("utf-8", "replace"), path, "exec")
    if b"import *" in source:
        return frozenset()
    bound, used = set(_MODULE_NAMES), set[str]()
    for table in _tables(top):
        for symbol in table.get_symbols():
            at_module = table is top or symbol.is_global()
            if at_module and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()):
                bound.add(symbol.get_name())
            elif at_module and symbol.is_referenced():
                used.add(symbol.get_name())
    return frozenset(used - bound)


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)

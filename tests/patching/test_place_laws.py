"""A hunk lands in its own function or nowhere, on random modules full of twins; ast is the judge."""

import ast

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from provisioner.patching.compare import change_between
from provisioner.patching.hunks import Applied, apply_change, cut_of
from provisioner.patching.model import Cut, FileFacts, Patch, SeriesPatch, Verdict
from provisioner.patching.series import judge_series

Bodies = dict[str, tuple[str, ...]]
NAMES = ("A.run", "A.load", "B.run", "B.load", "main", "run")
STATEMENTS = st.sampled_from(["a = 1", "b = 2", "c = 3", "d = (\n1,\n)", "e = '''\ndef x():\n'''", "# note", "f(a)"])
BODY = st.lists(STATEMENTS, min_size=4, max_size=8).map(tuple)


@st.composite
def modules(draw: st.DrawFn) -> Bodies:
    """Bodies by qualified name; often the same one."""
    common = draw(BODY)
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=2, max_size=5))
    return {name: common if draw(st.booleans()) else draw(BODY) for name in names}


def write(bodies: Bodies, order: list[str], imports: int = 0) -> bytes:
    """The module's source; classes are kept together in the order of their first method."""
    out = [f"import m{n}\n" for n in range(imports)]
    tops = list(dict.fromkeys(name.partition(".")[0] if "." in name else name for name in order))
    for top in tops:
        methods = [name for name in order if name.startswith(f"{top}.")]
        if methods:
            out.append(f"class {top}:\n")
            out += [_function(name.partition(".")[2], bodies[name], "    ") + "\n" for name in methods]
        else:
            out.append(_function(top, bodies[top], "") + "\n\n")
    return "".join(out).encode()


def _function(name: str, body: tuple[str, ...], indent: str) -> str:
    lines = [f"{indent}def {name}():\n"]
    for statement in (*body, "return a"):
        first, *rest = statement.split("\n")
        lines += [f"{indent}    {first}\n", *(f"{line}\n" for line in rest)]
    return "".join(lines)


def functions_of(source: bytes) -> dict[str, str]:
    """Every function's text as the parser sees it, comments left out, by qualified name."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for function in inner:
            if isinstance(function, ast.FunctionDef):
                found[prefix + function.name] = ast.dump(function)
    return found


@settings(max_examples=300, deadline=None)
@given(bodies=modules(), data=st.data())
def test_a_hunk_changes_its_own_function_or_none(bodies: Bodies, data: st.DataObject) -> None:
    order = list(bodies)
    base = write(bodies, order)
    target = data.draw(st.sampled_from(order))
    at = data.draw(st.integers(0, len(bodies[target]) - 1))
    kept = bodies[target]
    fixed = {**bodies, target: (*kept[:at], "fixed = 0", *kept[at + data.draw(st.integers(0, 1)) :])}
    change = change_between("m.py", base, write(fixed, order))
    assert change is not None
    cut = cut_of(base, change)
    assert cut is not None
    assert set(cut.scopes) == {target}

    upstream = dict(bodies)
    for name in data.draw(st.lists(st.sampled_from(order), unique=True)):
        changed = list(upstream[name])
        del changed[data.draw(st.integers(0, len(changed) - 1))]
        upstream[name] = (*changed, *data.draw(st.lists(STATEMENTS, max_size=2)))
    gone = data.draw(st.lists(st.sampled_from(order), unique=True, max_size=len(order) - 1))
    new_order = data.draw(st.permutations([name for name in order if name not in gone]))
    moved = write(upstream, new_order, imports=data.draw(st.integers(0, 3)))

    done = apply_change(moved, change, Cut(scopes=cut.scopes))
    if not isinstance(done, Applied):
        return
    assert done.content is not None
    before, after = functions_of(moved), functions_of(done.content)
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == [target]


@settings(max_examples=200, deadline=None)
@given(bodies=modules(), data=st.data())
def test_applied_is_said_of_the_very_bytes_alone(bodies: Bodies, data: st.DataObject) -> None:
    """Whatever stands on disk, ``applied`` means the bytes that the patch gives on the pristine ones."""
    order = list(bodies)
    pristine = write(bodies, order)
    target = data.draw(st.sampled_from(order))
    patched = write({**bodies, target: (*bodies[target], "fixed = 0")}, order)
    change = change_between("m.py", pristine, patched)
    assert change is not None
    cut = cut_of(pristine, change)
    series = [SeriesPatch(patch=Patch(id="p", source="p", digest="", changes=(change,)), cuts={"m.py": cut or Cut()})]
    other = data.draw(st.sampled_from(order))
    disk = data.draw(
        st.sampled_from(
            [
                pristine,
                patched,
                patched + b"# edited\n",
                patched.replace(b"    fixed = 0\n", b"    fixed = 0 \n", 1),
                write({**bodies, other: (*bodies[other], "fixed = 0")}, order),
                write({**bodies, target: (*bodies[target], "fixed = 0", "fixed = 0")}, order),
            ]
        )
    )
    facts = {"m.py": FileFacts(path="m.py", content=disk, pristine=pristine)}
    verdict = judge_series(series, facts)
    assert (verdict.patches[0].verdict is Verdict.APPLIED) == (disk == patched)
    assume(disk not in (pristine, patched))
    assert verdict.patches[0].verdict is Verdict.FOREIGN

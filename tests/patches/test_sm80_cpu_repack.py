"""The patch that puts the repack into vLLM: its text, and vLLM's own ``_custom_ops.py`` of eleven releases with it."""

import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from provisioner.digests import digest_of
from provisioner.marlin.cases import Case, random_words
from provisioner.marlin.layout import Activation, Layout, Packing, all_layouts, reference_repack
from provisioner.patching.hunks import Applied, apply_change, cut_of, reverse_change
from provisioner.patching.model import Create, Cut, FileFacts, Modify, Patch, Verdict
from provisioner.patching.series import judge_series
from provisioner.series.store import StoredPatch, cuts_of, load_series_patch, read_stored_patch
from provisioner.wheels.names import Target, choose
from provisioner.index.settings import read_settings
from provisioner.index.source import candidates, open_wheel, parse_spec
from provisioner.index.transport import Transport

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "patches/sm80-cpu-repack"
SOURCE = REPOSITORY / "provisioner/marlin/repack.py"
HOOKED = "vllm/_custom_ops.py"
ADDED = "vllm/_sm80_cpu_repack.py"
RELEASES = ("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0", "0.34.0")
WITHOUT_PERM = ("0.30.0", "0.31.0", "0.32.0", "0.33.0", "0.34.0")
WITHOUT_8_BIT_ACTIVATIONS = ("0.34.0",)
FUNCTIONS = ("gptq_marlin_repack", "awq_marlin_repack", "gptq_marlin_moe_repack", "awq_marlin_moe_repack")


@pytest.fixture(scope="module")
def stored() -> StoredPatch:
    return read_stored_patch(FOLDER)


@pytest.fixture(scope="module")
def patch(stored: StoredPatch) -> Patch:
    """The one text; loading it proves digest, files, hunks and counts of ``patch.toml``."""
    (variant,) = stored.variants
    return load_series_patch(stored, variant).patch


def test_the_patch_is_cut_from_the_source(patch: Patch) -> None:
    """``python patches/sm80-cpu-repack/cut.py`` makes it so again."""
    hook, module = patch.changes
    assert isinstance(hook, Modify)
    assert isinstance(module, Create)
    assert (hook.path, module.path) == (HOOKED, ADDED)
    made = apply_change(None, module)
    assert isinstance(made, Applied)
    assert made.content == SOURCE.read_bytes()


@pytest.mark.parametrize("version", [*RELEASES, "0.26.1rc1.dev1024+g1fe3a1571"])
def test_one_variant_covers_releases_and_nightlies(stored: StoredPatch, version: str) -> None:
    variant = stored.variant_for(Version(version))
    assert variant is stored.variants[0]
    assert stored.variant_for(Version("0.23.0")) is None


def test_the_note_on_the_cause_names_the_check_and_takes_no_side(stored: StoredPatch) -> None:
    assert stored.cause is not None
    assert "disagree" in stored.cause
    assert "provision verify --full" in stored.cause


def test_the_added_module_loads_light(tmp_path: Path) -> None:
    """vLLM imports it on every machine, so neither numba nor torch may come with it."""
    (tmp_path / "added.py").write_bytes(SOURCE.read_bytes())
    code = "import added, sys; print(sorted({'torch', 'numba', 'numpy', 'provisioner'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "[]\n"


# --- the real files of eleven releases ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    settings = read_settings(os.environ, Path.home(), cache=tmp_path_factory.mktemp("wheels"))
    contents = {}
    with Transport(settings) as transport:
        for release in RELEASES:
            found = candidates(parse_spec(f"pypi:{release}"), settings, transport=transport)
            chosen = choose(found, Target(python=(3, 12))).chosen
            contents[release] = open_wheel(chosen, settings, transport=transport).read(HOOKED)
    return contents


@pytest.fixture(scope="module")
def cut(originals: dict[str, bytes], patch: Patch, stored: StoredPatch) -> Cut:
    """What the store says of the file that the hunk was cut against; true of the real one."""
    (variant,) = stored.variants
    said = cuts_of(variant)[HOOKED]
    assert said == cut_of(originals[str(variant.cut_against)], patch.changes[0])
    return said


def test_no_hunk_depends_on_a_neighbour(patch: Patch) -> None:
    """All that a hunk quotes is the first lines of the function that it decorates."""
    hook = patch.changes[0]
    assert isinstance(hook, Modify)
    quoted = [[line.text.decode() for line in hunk.lines if line.kind != "+"] for hunk in hook.hunks]
    assert quoted == [[f"def {name}(", "    b_q_weight: torch.Tensor,"] for name in FUNCTIONS]


@pytest.mark.network
def test_the_former_text_is_known_where_it_is_installed(originals: dict[str, bytes], stored: StoredPatch) -> None:
    """An environment that the former text was put into is told that its text is old, not that it is damaged."""
    (variant,) = stored.variants
    today = load_series_patch(stored, variant)
    (former,) = today.former
    facts = {}
    for change in former.changes:
        pristine = originals["0.27.1"] if change.path == HOOKED else None
        done = apply_change(pristine, change)
        assert isinstance(done, Applied)
        facts[change.path] = FileFacts(
            path=change.path,
            content=done.content,
            pristine=pristine,
            recorded=digest_of(pristine) if pristine is not None else None,
        )
    (verdict,) = judge_series([today], facts).patches
    assert verdict.verdict is Verdict.STALE_VERSION


@pytest.mark.network
@pytest.mark.parametrize("release", RELEASES)
def test_one_text_applies_to_every_release(
    originals: dict[str, bytes], patch: Patch, cut: Cut, release: str
) -> None:
    pristine = originals[release]
    done = apply_change(pristine, patch.changes[0], cut)
    assert isinstance(done, Applied)
    assert done.verdict in (Verdict.APPLIES, Verdict.APPLIES_AT_OFFSET)
    assert done.content is not None
    back = reverse_change(done.content, patch.changes[0], cut)
    assert isinstance(back, Applied)
    assert back.content == pristine


class Recorder:
    """Stands for ``torch.ops._C``: notes the calls and answers with a tensor of the right shape."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.endswith("marlin_repack"):
            raise AttributeError(name)
        return lambda *args: self._answer(name, args)

    def _answer(self, name: str, args: tuple[Any, ...]) -> Any:
        import torch

        self.calls.append((name, args))
        size_k, size_n, bits = [arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)][:3]
        return torch.zeros((size_k // 16, size_n * bits // 2), dtype=torch.int32)


def stand_in_modules() -> dict[str, types.ModuleType]:
    """What ``vllm/_custom_ops.py`` imports from the rest of vLLM, without the rest of vLLM."""
    names = ("envs", "logger", "platforms", "scalar_type", "utils", "utils.flashinfer", "utils.math_utils")
    modules: dict[str, Any] = {f"vllm.{name}": types.ModuleType(f"vllm.{name}") for name in names}
    modules["vllm.envs"].VLLM_ROCM_FP8_MFMA_PAGE_ATTN = False
    modules["vllm.logger"].init_logger = lambda name: None
    modules["vllm.platforms"].current_platform = types.SimpleNamespace(
        import_kernels=lambda: None, is_rocm=lambda: False, is_cuda=lambda: False, is_cpu=lambda: True
    )
    modules["vllm.scalar_type"].ScalarType = object
    modules["vllm.utils.flashinfer"].flashinfer_quant_nvfp4_8x4_sf_layout = None
    modules["vllm.utils.math_utils"].cdiv = lambda a, b: -(-a // b)
    return modules


@pytest.fixture
def load_patched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, originals: dict[str, bytes], patch: Patch, cut: Cut
) -> Iterator[Callable[[str], Any]]:
    """Imports the patched ``_custom_ops`` of a release, with a recorder for the compiled ops."""

    def load(release: str) -> Any:
        package = tmp_path / "vllm"
        package.mkdir()
        (package / "__init__.py").touch()
        for change, content in zip(patch.changes, (originals[release], None), strict=True):
            done = apply_change(content, change, cut if content is not None else Cut())
            assert isinstance(done, Applied)
            assert done.content is not None
            (tmp_path / change.path).write_bytes(done.content)
        for name, module in stand_in_modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.syspath_prepend(tmp_path)
        ops = importlib.import_module("vllm._custom_ops")
        recorder = Recorder()
        monkeypatch.setattr(torch.ops, "_C", recorder, raising=False)
        return types.SimpleNamespace(ops=ops, recorder=recorder, added=sys.modules["vllm._sm80_cpu_repack"])

    import torch

    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)  # another test's, given back to it
    yield load
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def arguments(release: str, function: str, case: Case, experts: int = 2) -> dict[str, Any]:
    """The call as vLLM makes it, on CPU tensors."""
    import torch

    moe = "_moe_" in function
    each = [random_words(case, seed).view(np.int32) for seed in range(experts if moe else 1)]
    given: dict[str, Any] = {
        "b_q_weight": torch.from_numpy(np.stack(each) if moe else each[0]),
        "size_k": case.size_k,
        "size_n": case.size_n,
        "num_bits": case.layout.bits,
    }
    if release not in WITHOUT_8_BIT_ACTIVATIONS:
        given["is_a_8bit"] = case.layout.activation is Activation.NARROW
    if release not in WITHOUT_PERM and function != "awq_marlin_repack":
        given["perm"] = torch.empty((experts, 0) if moe else (0,), dtype=torch.int32)
    return given


def layouts_of(release: str, packing: Packing) -> list[Layout]:
    """What a release can ask of the functions for this packing."""
    narrow_too = release not in WITHOUT_8_BIT_ACTIVATIONS
    return [
        layout
        for layout in all_layouts()
        if layout.packing is packing and (narrow_too or layout.activation is not Activation.NARROW)
    ]


def expected(function: str, case: Case, experts: int = 2) -> Any:
    if "_moe_" in function:
        return np.stack([reference_repack(random_words(case, seed), case.layout) for seed in range(experts)])
    return reference_repack(random_words(case), case.layout)


@pytest.mark.network
@pytest.mark.parametrize("release", RELEASES)
def test_the_patched_file_routes_by_setting_device_and_bits(
    release: str, load_patched: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    loaded = load_patched(release)
    monkeypatch.setattr(loaded.added, "default_engine", loaded.added.TorchEngine)
    for function in FUNCTIONS:
        packing = Packing(function.partition("_")[0])
        routed = getattr(loaded.ops, function)
        for layout in layouts_of(release, packing):
            case = Case(layout=layout, size_k=64, size_n=128)
            given = arguments(release, function, case)

            monkeypatch.setenv("VLLM_MARLIN_CPU_REPACK", "1")
            made = routed(**given)
            assert np.array_equal(made.numpy().view(np.uint32), expected(function, case)), (function, case.name)
            assert loaded.recorder.calls == []

            for setting in ("0", "auto"):  # auto: these tensors are on no GPU of 8.0
                monkeypatch.setenv("VLLM_MARLIN_CPU_REPACK", setting)
                assert routed(**given).shape == made.shape
                op = f"{packing}_marlin_repack"
                assert [name for name, _ in loaded.recorder.calls] == [op] * (2 if "_moe_" in function else 1)
                loaded.recorder.calls.clear()

    monkeypatch.setenv("VLLM_MARLIN_CPU_REPACK", "auto")
    taken: list[Any] = []
    monkeypatch.setattr(
        loaded.added,
        "repack_from_device",
        lambda packing, words, *args, **kwargs: taken.append((packing, words.device.index)) or "made",
    )
    monkeypatch.setattr(loaded.added._ledger, "note", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ((8, 0), (9, 0))[device.index])
    for function in FUNCTIONS:
        given = arguments(release, function, Case(layout=Layout(bits=8), size_k=64, size_n=128))
        on_card = types.SimpleNamespace(device=torch.device("cuda:0"), nbytes=0)
        assert getattr(loaded.ops, function)(**given | {"b_q_weight": on_card}) == "made"
    assert taken == [("gptq", 0), ("awq", 0), ("gptq", 0), ("awq", 0)]
    for function in FUNCTIONS[:2]:
        given = arguments(release, function, Case(layout=Layout(bits=8), size_k=64, size_n=128))
        newer = types.SimpleNamespace(device=torch.device("cuda:1"), nbytes=0)
        getattr(loaded.ops, function)(**given | {"b_q_weight": newer})
    assert [name for name, _ in loaded.recorder.calls] == list(FUNCTIONS[:2])
    assert len(taken) == 4


# --- vLLM's own packer ----------------------------------------------------------------------------------------------

ORACLE = "vllm/model_executor/layers/quantization/utils/marlin_utils_test.py"


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The packer that vLLM tests its kernels with, imported by path from a real wheel."""
    folder = tmp_path_factory.mktemp("oracle")
    settings = read_settings(os.environ, Path.home(), cache=folder / "cache")
    with Transport(settings) as transport:
        found = candidates(parse_spec("pypi:0.27.1"), settings, transport=transport)
        content = open_wheel(choose(found, Target(python=(3, 12))).chosen, settings, transport=transport).read(ORACLE)
    modules: dict[str, Any] = {
        name: types.ModuleType(name)
        for name in (
            "vllm",
            "vllm._custom_ops",
            "vllm.scalar_type",
            "packer",
            "packer.marlin_utils",
            "packer.quant_utils",
        )
    }
    modules["vllm"]._custom_ops = modules["vllm._custom_ops"]
    modules["vllm.scalar_type"].ScalarType = modules["vllm.scalar_type"].scalar_types = object
    modules["packer"].__path__ = [str(folder)]
    modules["packer.marlin_utils"].GPTQ_MARLIN_TILE = 16
    modules["packer.marlin_utils"].marlin_permute_scales = modules["packer.marlin_utils"].marlin_zero_points = None
    for name in ("gptq_quantize_weights", "quantize_weights", "sort_weights"):
        setattr(modules["packer.quant_utils"], name, None)
    modules["packer.quant_utils"].get_pack_factor = lambda bits: 32 // bits
    (folder / "marlin_utils_test.py").write_bytes(content)
    with pytest.MonkeyPatch.context() as patching:
        for name, module in modules.items():
            patching.setitem(sys.modules, name, module)
        yield importlib.import_module("packer.marlin_utils_test")
        sys.modules.pop("packer.marlin_utils_test")


@pytest.mark.network
@pytest.mark.parametrize("layout", all_layouts(), ids=str)
@pytest.mark.parametrize(("size_k", "size_n"), [(32, 64), (96, 192), (256, 1088)])
def test_vllms_own_packer_agrees(oracle: Any, layout: Layout, size_k: int, size_n: int) -> None:
    import torch

    from provisioner.marlin.layout import unpack_values
    from provisioner.marlin.repack import repack

    case = Case(layout=layout, size_k=size_k, size_n=size_n)
    words = random_words(case)
    narrow = layout.activation is Activation.NARROW
    values = torch.from_numpy(unpack_values(words, layout).astype(np.int32))
    theirs = oracle.marlin_weights(
        values, size_k, size_n, layout.bits, oracle.get_weight_perm(layout.bits, narrow), is_a_8bit=narrow
    )
    assert np.array_equal(theirs.numpy().view(np.uint32), reference_repack(words, layout))
    made = repack(layout.packing, torch.from_numpy(words.view(np.int32)), size_k, size_n, layout.bits, is_a_8bit=narrow)
    assert torch.equal(theirs, made)
    values[size_k // 2, size_n // 2] ^= 1
    mutated = oracle.marlin_weights(
        values, size_k, size_n, layout.bits, oracle.get_weight_perm(layout.bits, narrow), is_a_8bit=narrow
    )
    assert int((mutated != made).sum()) == 1


# --- a real vLLM, without a GPU -------------------------------------------------------------------------------------

IN_VLLM = """
import hashlib, importlib.util, json, sys
overlay = json.loads(sys.argv[1])

class Overlay:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, overlay[name]) if name in overlay else None

sys.meta_path.insert(0, Overlay)
import vllm._custom_ops as ops
import torch

words = torch.arange(64 * 128 // 4, dtype=torch.int32).mul_(2654435761 - (1 << 32)).view(16, 128)
answer = {"routed": [hasattr(getattr(ops, name), "__wrapped__") for name in sys.argv[2].split(",")]}
try:
    made = ops.gptq_marlin_repack(words, torch.empty(0, dtype=torch.int32), 64, 128, 8)
    answer["digest"] = hashlib.sha256(made.numpy().tobytes()).hexdigest()
except (AttributeError, NotImplementedError, RuntimeError) as error:
    answer["refused"] = type(error).__name__
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def real_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a venv with vLLM 0.27.1: the one that PROVISION_TEST_VENV names, or one made here."""
    if given := os.environ.get("PROVISION_TEST_VENV"):
        return Path(given) / "bin/python"
    home = tmp_path_factory.mktemp("home")
    subprocess.run(
        [sys.executable, "-m", "provisioner", "hynix-stable"],
        env={**os.environ, "PROVISION_HOME": str(home), "PYTHONPATH": str(REPOSITORY)},
        cwd=home,
        capture_output=True,
        timeout=1200,
        check=True,
    )
    return home / "venvs/hynix-stable/bin/python"


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_vllm_imports_pristine_and_patched(
    real_vllm: Path, originals: dict[str, bytes], patch: Patch, cut: Cut, tmp_path: Path
) -> None:
    """Without a GPU; the patched files are laid over the installed package, which is not touched."""
    overlay = {}
    for change, content in zip(patch.changes, (originals["0.27.1"], None), strict=True):
        done = apply_change(content, change, cut if content is not None else Cut())
        assert isinstance(done, Applied)
        assert done.content is not None
        path = tmp_path / Path(change.path).name
        path.write_bytes(done.content)
        overlay[change.path.removesuffix(".py").replace("/", ".")] = str(path)

    def ask(files: dict[str, str], setting: str) -> dict[str, Any]:
        result = subprocess.run(
            [str(real_vllm), "-c", IN_VLLM, json.dumps(files), ",".join(FUNCTIONS)],
            env={**os.environ, "VLLM_MARLIN_CPU_REPACK": setting, "NUMBA_CACHE_DIR": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return dict(json.loads(result.stdout.splitlines()[-1]))

    words = (np.arange(64 * 128 // 4, dtype=np.uint32) * np.uint32(2654435761)).reshape(16, 128)
    made = digest_of(reference_repack(words, Layout(bits=8)).tobytes())
    pristine = ask({}, "1")
    assert pristine["routed"] == [False] * 4
    assert "digest" not in pristine
    assert ask(overlay, "1") == {"routed": [True] * 4, "digest": made}
    assert ask(overlay, "auto") == {"routed": [True] * 4, "refused": pristine["refused"]}

"""The check of one environment on one card: what is asked of the child processes, and what their answers mean."""

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, assert_never

from provisioner.counts import count_text
from provisioner.digests import Digest
from provisioner.errors import UsageError
from provisioner.gpu.devices import visibility_of
from provisioner.gpu.health import WARM_REBOOT, XidSource, XidWatch, probe_card, sources_for
from provisioner.gpu.model import Card, Observation, Probe, ProbeVerdict
from provisioner.gpu.report import (
    Ballast,
    CaseFailure,
    Code,
    Difference,
    Form,
    Health,
    Layers,
    PatchBehaviour,
    StageReport,
    Verdict,
    VerifyReport,
    gravest,
)
from provisioner.gpu.runner import ChildEnd, Exited, Hung, Killed, Limits, Message, NotStarted, run_child
from provisioner.gpu.selection import Case, Selection, select_cases
from provisioner.gpu.xid import explain_xid
from provisioner.progress import Reporter, Silence

_MARLIN = Path(__file__).parent.parent / "marlin"
_PROGRAM = Path(__file__).with_name("child.py")
_GIB = 1 << 30
_MIB = 1 << 20
_OCCUPANCY = re.compile(r"(?P<amount>\d+(?:\.\d+)?)\s*(?P<unit>%|GiB|GB|MiB)", re.IGNORECASE)
_UNITS = {"gib": _GIB, "gb": 10**9, "mib": _MIB}
# What the 27B model's weights leave resident when the repack runs; the fault shows at this fill and not below.
_PRODUCTION_BYTES = 27 * _GIB
# The largest case beside the ballast (input, poison, answer of a fused gate-up projection) and the driver's own needs.
_HEADROOM_BYTES = 1536 * _MIB
_SWEEP_HEADROOM_BYTES = 256 * _MIB
# A hang is told from slow work by these.
_LIMITS = Limits(start=300, silence=60, work=180, total=900)
_LONG_LIMITS = Limits(start=300, silence=60, work=900, total=3600)
_MODEL_LIMITS = Limits(start=300, silence=60, work=900, total=24 * 3600)
_BEHAVIOUR_LIMITS = Limits(start=600, silence=300, work=300, total=1800)
_LIBRARIES = ("_C_stable_libtorch.abi3.so", "_C.abi3.so")
_ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True, kw_only=True)
class FixedOccupancy:
    """So many bytes of ballast."""

    bytes: int


@dataclass(frozen=True, kw_only=True)
class ShareOfFree:
    """Ballast of this share (0 to 1) of what is free."""

    share: float


Occupancy = FixedOccupancy | ShareOfFree


@dataclass(frozen=True, kw_only=True)
class BehaviourCheck:
    """A patch's own check of its kernels: a program, and a folder with the touched files as shipped."""

    patch: str
    program: Path
    pristine: Path


@dataclass(frozen=True, kw_only=True)
class Target:
    """The environment under test.

    ``fallback`` is the module with the CPU repack that a patch added (None: this tool's own). ``shipped`` has RECORD's
    digests by path; ``patches`` the digests of the applied patch texts by id; ``unchecked`` names what cannot be tested
    here; ``allocator`` is the value of PYTORCH_CUDA_ALLOC_CONF that will serve.
    """

    python: Path
    site_packages: Path
    version: str
    package: str = "vllm"
    fallback: Path | None = None
    shipped: Mapping[str, Digest | None] = field(default_factory=dict)
    patches: Mapping[str, Digest] = field(default_factory=dict)
    behaviours: tuple[BehaviourCheck, ...] = ()
    unchecked: tuple[str, ...] = ()
    allocator: str | None = None


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What to check: the form, the ballast (None: by the card), a folder of real weights."""

    form: Form = Form.QUICK
    occupancy: Occupancy | None = None
    model: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the check stands on; tests put other parts here. ``device`` is ``cuda``, or ``cpu`` without a card."""

    device: str = "cuda"
    program: Path = _PROGRAM
    probe: Callable[[Card], Probe] | None = probe_card
    sources: Callable[[Card], Sequence[XidSource]] = sources_for
    limits: Limits | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cases: Callable[[Selection], Sequence[Case]] = select_cases
    headroom: int = _HEADROOM_BYTES
    settle_seconds: float = 0.3


@dataclass(frozen=True, kw_only=True)
class _Session:
    """One child process: its stages, and how long it may take."""

    stages: tuple[Mapping[str, Any], ...]
    limits: Limits


def parse_occupancy(text: str) -> Occupancy:
    """``27GiB``, ``38GB``, ``512MiB`` or ``95%``. Raises UsageError for anything else."""
    match = _OCCUPANCY.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no occupancy", expected="a form such as 27GiB or 95%", found=text)
    amount = float(match["amount"])
    if match["unit"] != "%":
        return FixedOccupancy(bytes=int(amount * _UNITS[match["unit"].lower()]))
    if not 0 < amount <= 100:
        raise UsageError(f"{text!r} is no share", expected="more than 0 and at most 100 %", found=text)
    return ShareOfFree(share=amount / 100)


def default_occupancy(card: Card) -> Occupancy:
    """27 GiB, what production holds, where that much is free; else three quarters of what is."""
    if card.memory_free > _PRODUCTION_BYTES + _HEADROOM_BYTES:
        return FixedOccupancy(bytes=_PRODUCTION_BYTES)
    return ShareOfFree(share=0.75)


def report_not_run(why: str, *, tool: str, form: Form = Form.QUICK) -> VerifyReport:
    """The report of a check that could not begin; never a pass."""
    return VerifyReport(
        created=_now(),
        tool=tool,
        form=form,
        verdict=Verdict.NOT_RUN,
        why=why,
        health=Health.UNOBSERVED,
        bound={},
        seconds=0.0,
    )


def verify_card(
    target: Target,
    card: Card,
    wish: Wish,
    *,
    tool: str,
    reporter: Reporter | None = None,
    bench: Bench | None = None,
) -> VerifyReport:
    """Check ``target`` on ``card``. Whatever the card or the child processes do, a report comes back.

    A wedge probe comes first and after anything odd; Xids are watched from before the first to after the last process.
    """
    return _Check(target, card, wish, tool, reporter or Silence(), bench or Bench()).run()


def find_libraries(site_packages: Path, package: str = "vllm") -> tuple[Path, ...]:
    """The op libraries of the installed package, those that are known to register the repack first."""
    folder = site_packages / package
    known = [folder / name for name in _LIBRARIES if (folder / name).is_file()]
    return (*known, *(path for path in sorted(folder.glob("_C*.so")) if path not in known))


def gather_facts(target: Target, card: Card | None, *, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a verdict depends on, as it is now, under the names of :attr:`VerifyReport.bound`.

    ``known`` is a former report's ``bound``: a library whose size and time are as they were is not hashed again.
    """
    facts = {target.package: target.version, "allocator": target.allocator or "default"}
    if card is not None:
        facts |= {"card": card.uuid, "driver": card.driver, "VBIOS": card.vbios or "unknown"}
    torch = _read_torch_version(target.site_packages)
    if torch is not None:
        facts["torch"] = torch
    for library in find_libraries(target.site_packages, target.package)[:1]:
        facts |= _library_facts(library, known or {})
    facts["fallback"] = _digest_file(target.fallback or _MARLIN / "repack.py")
    facts |= {f"patch {id_}": digest for id_, digest in target.patches.items()}
    return facts


class _Check:
    """One run of :func:`verify_card`; collects what becomes the report."""

    def __init__(self, target: Target, card: Card, wish: Wish, tool: str, reporter: Reporter, bench: Bench) -> None:
        self._target = target
        self._card = card
        self._wish = wish
        self._tool = tool
        self._reporter = reporter
        self._bench = bench
        self._started = time.monotonic()
        self._probes: list[Probe] = []
        self._processes = 0
        self._asked_again = False
        self._verdicts: list[tuple[Verdict, str]] = []
        self._stages: list[StageReport] = []
        self._behaviours: list[PatchBehaviour] = []
        self._codes: dict[str, Code] = {}
        self._torch: dict[str, str] = {}
        self._schemas: dict[str, str] = {}
        self._layers: Layers | None = None

    def run(self) -> VerifyReport:
        with XidWatch(self._card, self._bench.sources(self._card)) as watch:
            self._probe("look whether the card answers")
            if not self._stop:
                self._run_processes()
            observation = watch.observe(settle_seconds=self._bench.settle_seconds)
        if observation.events:
            first = observation.events[0]
            self._conclude(Verdict.CARD_FAULT, f"Xid {first.code} on this card: {explain_xid(first.code).title}")
        faulty = any(verdict in (Verdict.CARD_FAULT, Verdict.LOST) for verdict, _ in self._verdicts)
        if faulty and self._processes and not self._asked_again:
            self._probe("look whether the card still answers")
        return self._report(observation)

    def _run_processes(self) -> None:
        """The repack's stages, then the patched kernels; both at once in the quick form, which has to be quick."""
        if self._wish.form is Form.FULL or not self._target.behaviours:
            self._run_sessions()
            if not self._stop:
                self._take_behaviours(self._run_behaviours(self._reporter, None))
            return
        call_off = threading.Event()
        with ThreadPoolExecutor(1, thread_name_prefix="behaviours") as pool:
            behaviours = pool.submit(self._run_behaviours, Silence(), call_off)
            try:
                self._run_sessions()
            except BaseException:
                call_off.set()
                raise
            if self._stop:
                call_off.set()
            self._reporter.stage("check the patched kernels")
            self._take_behaviours(behaviours.result())

    @property
    def _stop(self) -> bool:
        """Whether something was found that makes further stages pointless or harmful."""
        return any(verdict not in (Verdict.BIT_EXACT, Verdict.MISMATCH) for verdict, _ in self._verdicts)

    def _conclude(self, verdict: Verdict, why: str) -> None:
        self._verdicts.append((verdict, why))

    def _probe(self, stage: str) -> ProbeVerdict | None:
        if self._bench.probe is None:
            return None
        self._reporter.stage(stage)
        probe = self._bench.probe(self._card)
        self._probes.append(probe)
        match probe.verdict:
            case ProbeVerdict.ANSWERS:
                pass
            case ProbeVerdict.WEDGED:
                self._conclude(Verdict.WEDGED, probe.why)
            case ProbeVerdict.LOST:
                self._conclude(Verdict.LOST, probe.why)
            case ProbeVerdict.TOOLCHAIN:
                self._conclude(Verdict.TOOLCHAIN, probe.why)
            case _:
                assert_never(probe.verdict)
        return probe.verdict

    def _run_sessions(self) -> None:
        if not find_libraries(self._target.site_packages, self._target.package):
            self._conclude(Verdict.UNSUPPORTED, f"{self._target.package} has no library named _C*.so")
            return
        for session in _plan_sessions(self._wish, self._card, self._bench):
            self._run_session(session)
            if self._stop:
                return

    def _run_session(self, session: _Session) -> None:
        messages: list[Message] = []
        self._processes += 1

        def listen(message: Message) -> None:
            messages.append(message)
            _report_progress(message, self._reporter)

        self._reporter.stage("start the environment's Python and torch")
        end = run_child(
            [str(self._target.python), "-I", str(self._bench.program)],
            request=self._request(session),
            environment=self._environment(),
            limits=self._bench.limits or session.limits,
            on_message=listen,
        )
        self._take(messages, end)

    def _request(self, session: _Session) -> dict[str, Any]:
        target = self._target
        return {
            "device": self._bench.device,
            "libraries": [str(path) for path in find_libraries(target.site_packages, target.package)],
            "fallback": str(target.fallback or _MARLIN / "repack.py"),
            "reference": str(_MARLIN / "layout.py"),
            "stages": [dict(stage) for stage in session.stages],
        }

    def _environment(self) -> dict[str, str]:
        environment = {key: value for key, value in self._bench.environment.items() if not key.startswith("PYTHON")}
        environment |= visibility_of(self._card)
        environment.pop("PYTORCH_ALLOC_CONF", None)
        environment.pop(_ALLOCATOR_VARIABLE, None)
        if self._target.allocator is not None:
            environment[_ALLOCATOR_VARIABLE] = self._target.allocator
        return environment

    def _take(self, messages: Sequence[Message], end: ChildEnd) -> None:
        """Turn one child's lines and its end into stages and verdicts."""
        for message in messages:
            self._take_fact(message)
        stages = read_stages(messages)
        ending = judge_end(messages, end)
        if ending is not None and isinstance(end, Hung):
            ending = self._judge_hang(end, ending)
        if ending is not None and stages and not _is_finished(messages):
            stages = (*stages[:-1], replace(stages[-1], verdict=ending[0], why=ending[1]))
        elif ending is not None:
            self._conclude(*ending)
        self._stages += stages
        for stage in stages:
            self._conclude(stage.verdict, f"{stage.name}: {stage.why}")

    def _judge_hang(self, end: Hung, ending: tuple[Verdict, str]) -> tuple[Verdict, str]:
        """A hang is a wedged card only where the card does not answer another process, or nobody can ask it."""
        if self._bench.probe is None or end.left_behind is not None:
            return ending
        self._asked_again = True
        if self._probe("look whether the card still answers") is not ProbeVerdict.ANSWERS:
            return ending
        why = ending[1].removesuffix(f"; {WARM_REBOOT}")
        return Verdict.LOST, f"{why}; the card still answers other processes"

    def _take_fact(self, message: Message) -> None:
        match message.get("event"):
            case "torch":
                self._torch = {key: str(value) for key, value in message["facts"].items()}
                self._refuse_other_card(self._torch.get("uuid"))
            case "op":
                self._schemas = dict(message["schemas"])
            case "code":
                self._codes[str(message["role"])] = self._read_code(message)
            case "layers":
                self._layers = Layers(**{key: value for key, value in message.items() if key != "event"})
            case _:
                pass

    def _refuse_other_card(self, uuid: str | None) -> None:
        """CUDA must have handed over the card that was chosen; torch writes its UUID without the prefix."""
        if uuid and uuid.removeprefix("GPU-") != self._card.uuid.removeprefix("GPU-"):
            self._conclude(Verdict.TOOLCHAIN, f"CUDA handed over card GPU-{uuid}, not {self._card.uuid}")

    def _read_code(self, message: Message) -> Code:
        file, digest = str(message["file"]), str(message["digest"])
        path = Path(file)
        inside = path.is_relative_to(self._target.site_packages)
        name = path.relative_to(self._target.site_packages).as_posix() if inside else path.name
        recorded = self._target.shipped.get(name)
        origin = str(message["origin"])
        if recorded is not None:
            origin += ", as shipped" if recorded == digest else ", NOT as shipped"
        elif not inside:
            origin += ", of this tool"
        return Code(role=str(message["role"]), file=name, digest=digest, device=str(message["device"]), origin=origin)

    def _take_behaviours(self, behaviours: Sequence[PatchBehaviour]) -> None:
        for behaviour in behaviours:
            self._behaviours.append(behaviour)
            self._conclude(behaviour.verdict, f"patch {behaviour.patch}: {behaviour.why}")

    def _run_behaviours(self, reporter: Reporter, call_off: threading.Event | None) -> list[PatchBehaviour]:
        """Every patch's own check, until one does not pass or the whole is called off."""
        done: list[PatchBehaviour] = []
        for check in self._target.behaviours:
            reporter.stage(f"check the kernels of {check.patch}")
            behaviour = self._run_behaviour(check, reporter, call_off)
            if call_off is not None and call_off.is_set():
                break
            done.append(behaviour)
            if behaviour.verdict is not Verdict.BIT_EXACT:
                break
        return done

    def _run_behaviour(
        self, check: BehaviourCheck, reporter: Reporter, call_off: threading.Event | None
    ) -> PatchBehaviour:
        results: list[Message] = []

        def listen(message: Message) -> None:
            results.append(message)
            reporter.detail(f"{message.get('kernel')}: {message.get('case')}")

        command = [str(self._target.python), "-I", str(check.program), "--device", self._bench.device]
        command += ["--pristine", str(check.pristine), "--patched", str(self._target.site_packages)]
        command += ["--quick"] if self._wish.form is Form.QUICK else []
        environment = self._environment()
        if self._bench.device == "cpu":
            environment["TRITON_INTERPRET"] = "1"
        end = run_child(
            command,
            request={},
            environment=environment,
            limits=self._bench.limits or _BEHAVIOUR_LIMITS,
            on_message=listen,
            stop=call_off,
        )
        verdict, why = judge_behaviour(results, end)
        checks = {f"{result['kernel']}: {result['case']}": result["detail"] or "ok" for result in results}
        return PatchBehaviour(patch=check.patch, verdict=verdict, why=why, checks=checks)

    def _gather_facts(self) -> dict[str, str]:
        facts = gather_facts(self._target, self._card)
        if "version" in self._torch:
            facts.setdefault("torch", self._torch["version"])
        return facts

    def _report(self, observation: Observation) -> VerifyReport:
        verdict = gravest(verdict for verdict, _ in self._verdicts)
        if verdict is Verdict.BIT_EXACT and not _is_proof(self._codes):
            verdict, why = Verdict.NOT_RUN, "the answers did not come from three different programs"
        else:
            why = next((why for found, why in self._verdicts if found is verdict), "nothing was compared")
        if verdict is Verdict.BIT_EXACT:
            why = _describe_pass(self._stages, self._codes)
        return VerifyReport(
            created=_now(),
            tool=self._tool,
            form=self._wish.form,
            verdict=verdict,
            why=why,
            health=_judge_health(observation),
            bound=self._gather_facts(),
            seconds=round(time.monotonic() - self._started, 2),
            card=self._card,
            torch=self._torch,
            schemas=self._schemas,
            codes=tuple(self._codes.values()),
            stages=tuple(self._stages),
            behaviours=tuple(self._behaviours),
            layers=self._layers,
            xids=observation.events,
            xids_elsewhere=observation.elsewhere,
            xid_sources=observation.sources,
            xid_unreadable=observation.unreadable,
            probes=tuple(self._probes),
            untested="; ".join(_find_untested(self._wish, self._card, self._stages, self._target.unchecked)) or None,
        )


def read_stages(messages: Iterable[Message]) -> tuple[StageReport, ...]:
    """What one child said of its stages, in order; a stage that did not end keeps what it had."""
    stages: list[StageReport] = []
    for message in messages:
        match message.get("event"):
            case "stage":
                stages.append(StageReport(name=str(message["stage"]), verdict=Verdict.NOT_RUN, why="", seconds=0.0))
            case "result":
                stages[-1] = _add_result(stages[-1], message)
            case "ballast":
                stages[-1] = replace(stages[-1], ballast=_read_ballast(message))
            case "ballast-check":
                stages[-1] = _add_ballast_check(stages[-1], message)
            case "stage-end":
                stages[-1] = _close_stage(stages[-1], float(message["seconds"]))
            case _:
                pass
    return tuple(stages)


def judge_end(messages: Sequence[Message], end: ChildEnd) -> tuple[Verdict, str] | None:
    """Verdict and reason of a child that did not end well; None for one that did."""
    place = _describe_place(messages)
    failure = next((message for message in messages if message.get("event") == "failure"), None)
    match end:
        case Hung(why=why, left_behind=pid):
            remains = "" if pid is None else f"; process {pid} cannot be killed"
            return Verdict.WEDGED, f"the process hung{place}: {why}{remains}; {WARM_REBOOT}"
        case Killed(signal_name=name):
            return Verdict.LOST, f"the process was ended by {name}{place}"
        case NotStarted(why=why):
            return Verdict.TOOLCHAIN, f"the environment's Python does not start: {why}"
        case Exited(code=code, stderr=stderr):
            if failure is not None:
                return _FAILURES[str(failure["kind"])], f"{failure['why']}{place}"
            if code == 0 and messages and messages[-1].get("event") == "done":
                return None
            return Verdict.LOST, f"the process ended with status {code}{place}: {_last_line(stderr)}"
        case _:
            assert_never(end)


_FAILURES = {
    "toolchain": Verdict.TOOLCHAIN,
    "unsupported": Verdict.UNSUPPORTED,
    "card": Verdict.CARD_FAULT,
    "lost": Verdict.LOST,
    "memory": Verdict.NOT_RUN,
    "internal": Verdict.NOT_RUN,
}


def judge_behaviour(results: Sequence[Message], end: ChildEnd) -> tuple[Verdict, str]:
    """What a patch's own check says of its kernels."""
    place = f" after {results[-1].get('kernel')}: {results[-1].get('case')}" if results else ""
    failed = [result for result in results if not result.get("ok")]
    match end:
        case Hung(why=why):
            return Verdict.WEDGED, f"the check hung{place}: {why}"
        case Killed(signal_name=name):
            return Verdict.LOST, f"the check was ended by {name}{place}"
        case NotStarted(why=why):
            return Verdict.TOOLCHAIN, f"the environment's Python does not start: {why}"
        case Exited(code=code, stderr=stderr):
            if failed:
                first = failed[0]
                text = f"{first.get('kernel')}, {first.get('case')}: {first.get('detail')}"
                return Verdict.MISMATCH, f"{len(failed)} of {count_text(len(results), 'case')} failed: {text}"
            if code == 0 and results:
                return Verdict.BIT_EXACT, count_text(
                    len(results), "case behaves as promised", "cases behave as promised"
                )
            return Verdict.NOT_RUN, f"the check did not run (status {code}): {_last_line(stderr)}"
        case _:
            assert_never(end)


def _plan_sessions(wish: Wish, card: Card, bench: Bench) -> tuple[_Session, ...]:
    """One process in the quick form, where starting torch is most of the time; else one for each stage."""

    def stage(name: str, selection: Selection, **more: Any) -> dict[str, Any]:
        cases = [asdict(case) for case in bench.cases(selection)]
        return {"name": name, "cases": cases, "sparse": wish.form is Form.QUICK, **more}

    ballast = _ballast_request(wish.occupancy or default_occupancy(card), bench.headroom)
    after = stage("after", Selection.SMOKE)
    if wish.form is Form.QUICK:
        loaded = stage("loaded", Selection.QUICK, ballast=ballast)
        sessions = [_Session(stages=(stage("low", Selection.SMOKE), loaded, after), limits=_LIMITS)]
    else:
        sweep = {"share": 1.0, "headroom": min(_SWEEP_HEADROOM_BYTES, bench.headroom)}
        loaded = stage("loaded", Selection.ALL, ballast=ballast)
        large = stage("large", Selection.LARGE)
        alone = (stage("low", Selection.SMALL), loaded, after, large, {"name": _SWEEP, "ballast": sweep})
        sessions = [_Session(stages=(each,), limits=_LONG_LIMITS) for each in alone]
    if wish.model is not None:
        model = {"name": "model", "model": str(wish.model)}
        sessions.append(_Session(stages=(model,), limits=_MODEL_LIMITS))
    return tuple(sessions)


def _ballast_request(occupancy: Occupancy, headroom: int) -> dict[str, Any]:
    match occupancy:
        case FixedOccupancy(bytes=count):
            return {"bytes": count, "headroom": headroom}
        case ShareOfFree(share=share):
            return {"share": share, "headroom": headroom}
        case _:
            assert_never(occupancy)


def _add_result(stage: StageReport, message: Message) -> StageReport:
    match message["outcome"]:
        case "agrees":
            return replace(stage, agreed=stage.agreed + 1)
        case "refused":
            return replace(stage, refused=stage.refused + 1)
        case _:
            differences = tuple(Difference(**values) for values in message.get("differences", ()))
            failure = CaseFailure(case=str(message["case"]), why=str(message["why"]), differences=differences)
            return replace(stage, failures=(*stage.failures, failure))


def _read_ballast(message: Message) -> Ballast:
    counts = {key: int(message[key]) for key in ("asked", "filled", "used", "free")}
    return Ballast(**counts, wrong=0, first_wrong=None)


def _add_ballast_check(stage: StageReport, message: Message) -> StageReport:
    if stage.ballast is None:
        return stage
    first = message.get("first")
    ballast = replace(stage.ballast, wrong=int(message["wrong"]), first_wrong=None if first is None else str(first))
    return replace(stage, ballast=ballast)


def _close_stage(stage: StageReport, seconds: float) -> StageReport:
    verdict, why = _judge_stage(stage)
    return replace(stage, verdict=verdict, why=why, seconds=seconds)


def _judge_stage(stage: StageReport) -> tuple[Verdict, str]:
    ballast = stage.ballast
    if ballast is not None and ballast.wrong:
        return (
            Verdict.CARD_FAULT,
            f"{count_text(ballast.wrong, 'word')} of the ballast read back changed ({ballast.first_wrong})",
        )
    if stage.failures:
        first = stage.failures[0]
        count = count_text(len(stage.failures), "case does", "cases do")
        return Verdict.MISMATCH, f"{count} not hold, first {first.case}: {first.why}"
    if stage.name == _SWEEP:
        return Verdict.BIT_EXACT, f"{_gib(ballast.filled if ballast else 0)} written and read back"
    if ballast is not None and max(ballast.filled, ballast.used) < 0.97 * ballast.asked:
        return Verdict.NOT_RUN, (
            f"only {_gib(ballast.used)} of the card could be filled, {_gib(ballast.asked)} were asked: "
            "stop what else uses the card, or ask for less with --occupancy"
        )
    if not stage.agreed:
        return Verdict.UNSUPPORTED, "this build's operators take none of the cases"
    return Verdict.BIT_EXACT, count_text(stage.agreed, "case agrees", "cases agree")


_SWEEP = "memory"


def _is_finished(messages: Sequence[Message]) -> bool:
    """Whether the last stage that began also ended."""
    events = [message.get("event") for message in messages]
    return [event for event in events if event in ("stage", "stage-end")][-1:] == ["stage-end"]


def _judge_health(observation: Observation) -> Health:
    if observation.events:
        return Health.FAULT
    return Health.WELL if observation.is_observed else Health.UNOBSERVED


def _describe_place(messages: Sequence[Message]) -> str:
    """Where a child was, from its last words."""
    for message in reversed(messages):
        if message.get("event") == "progress":
            return f" in {message['unit']}"
        if message.get("event") in ("stage", "torch"):
            break
    if any(message.get("event") == "stage" for message in messages):
        return ""
    return "" if messages else " before torch was there"


def _is_proof(codes: Mapping[str, Code]) -> bool:
    """Whether three different programs answered."""
    return set(codes) == {"compiled", "fallback", "reference"} and len({code.digest for code in codes.values()}) == 3


def _describe_pass(stages: Sequence[StageReport], codes: Mapping[str, Code]) -> str:
    cases = sum(stage.agreed for stage in stages)
    used = max((stage.ballast.used for stage in stages if stage.ballast and stage.agreed), default=0)
    fallback = codes["fallback"]
    whose = "this tool's fallback" if "of this tool" in fallback.origin else f"the environment's {fallback.file}"
    return f"the compiled repack, {whose} and the reference agree in {cases} comparisons, up to {_gib(used)} in use"


def _find_untested(
    wish: Wish, card: Card, stages: Sequence[StageReport], unchecked: tuple[str, ...]
) -> tuple[str, ...]:
    if wish.form is Form.QUICK:
        return ("memory beyond the ballast", "weights above 2 GiB (--full)", *unchecked)
    sweep = next((stage.ballast for stage in stages if stage.name == _SWEEP), None)
    if sweep is None:
        return ("memory beyond the ballast", *unchecked)
    rest = f"{_gib(card.memory_total - sweep.filled)} of {_gib(card.memory_total)}, which driver, torch and others hold"
    return (rest, *unchecked)


def _report_progress(message: Message, reporter: Reporter) -> None:
    match message.get("event"):
        case "stage":
            reporter.stage(f"compare: {message['stage']}")
        case "progress":
            reporter.amount(int(message["done"]), int(message["total"]), str(message["unit"]))
        case _:
            pass


def _library_facts(library: Path, known: Mapping[str, str]) -> dict[str, str]:
    status = library.stat()
    stamp = f"{library.name} {status.st_size} {status.st_mtime_ns}"
    digest = known.get("library") if known.get("library stamp") == stamp else None
    return {"library": digest or _digest_file(library), "library stamp": stamp}


def _digest_file(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        return "absent"


def _read_torch_version(site_packages: Path) -> str | None:
    try:
        text = (site_packages / "torch" / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return found[1] if found else None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing on stderr"])[-1][:300]


def _gib(count: int) -> str:
    return f"{count / _GIB:.2f} GiB"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

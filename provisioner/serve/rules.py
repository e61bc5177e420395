"""Combinations of arguments and environment that are known to fail, each with its reason. Pure.

A rule is a function from what is about to run (or runs) to findings. ``RULES`` is the whole list; the figures are the
field's (docs/recipes).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from packaging.version import Version

from provisioner.serve import flags
from provisioner.serve.findings import Finding, Severity, Subject
from provisioner.serve.flags import Setting

MOST_BATCHED_TOKENS = 8192
MATCH_BLOCK = 1600
MOST_DRAFTS = 3
GDN_PATCH = "pr50021-gdn-spec-bounds"
_TOKEN_FLAGS = ("--max-num-batched-tokens", "--max-num-scheduled-tokens")
_JSON_FLAGS = ("--speculative-config", "--compilation-config", "--attention-config")
_SEGMENTS = re.compile(r"(?:^|,)\s*expandable_segments\s*:\s*(true|false)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is about to run. ``memory_vendor`` is the card's, else the recipe's; None where neither is known.

    ``patches`` are the ids of the applied patches, None where they are not known.
    """

    settings: tuple[Setting, ...]
    environment: Mapping[str, str]
    memory_vendor: str | None = None
    version: Version | None = None
    patches: frozenset[str] | None = None


Rule = Callable[[Situation], Iterator[Finding]]


def judge(situation: Situation) -> tuple[Finding, ...]:
    """Every finding of every rule, in the order of ``RULES``."""
    return tuple(finding for rule in RULES for finding in rule(situation))


def expandable_segments_of(allocator: str) -> bool | None:
    """The setting inside a value of PYTORCH_CUDA_ALLOC_CONF; None where it is not named. The last one counts."""
    found = _SEGMENTS.findall(allocator)
    return found[-1].lower() == "true" if found else None


def _limit_batched_tokens(situation: Situation) -> Iterator[Finding]:
    for name in _TOKEN_FLAGS:
        setting = flags.find(situation.settings, name)
        if setting is None:
            continue
        tokens = flags.integer_of(setting)
        if tokens is None:
            yield _warn(
                "batched-tokens", f"{name} is not a number, so the limit cannot be checked", evidence=_said(setting)
            )
        elif tokens > MOST_BATCHED_TOKENS:
            yield _refuse(
                "batched-tokens",
                f"{name} is above {MOST_BATCHED_TOKENS}: prefill intermediates grow with it, "
                "and 32000 ran out of memory and wedged the card until a reboot",
                evidence=_said(setting),
                act=f"{name} {MOST_BATCHED_TOKENS}",
            )


def _fit_match_unit(situation: Situation) -> Iterator[Finding]:
    setting = flags.find(situation.settings, "--prefix-match-unit")
    if setting is None:
        return
    unit = flags.integer_of(setting)
    if not unit or MATCH_BLOCK % unit:
        yield _refuse(
            "prefix-match-unit",
            f"--prefix-match-unit must divide the {MATCH_BLOCK}-token block of the state cache; "
            "another value fails at boot",
            evidence=_said(setting),
            act="--prefix-match-unit 400",
        )


def _complete_trio(situation: Situation) -> Iterator[Finding]:
    if not flags.is_on(situation.settings, "--enable-prefix-caching"):
        return
    lacking = [] if flags.is_on(situation.settings, "--async-scheduling") else ["--async-scheduling"]
    lacking += [
        f"{name} {MOST_BATCHED_TOKENS}" for name in _TOKEN_FLAGS if flags.find(situation.settings, name) is None
    ]
    if lacking:
        yield _refuse(
            "prefix-trio",
            "prefix caching without async scheduling and both token limits: the hit rate stays at 0.0 % "
            "while the log says that the cache is on",
            evidence=(f"missing: {', '.join(lacking)}",),
            act=" ".join(lacking),
        )
        return
    values = [flags.integer_of(setting) for setting in _found(situation, _TOKEN_FLAGS)]
    if any(value is not None and value < MOST_BATCHED_TOKENS for value in values):
        yield _warn(
            "prefix-trio",
            f"the hit rate was measured with both token limits at {MOST_BATCHED_TOKENS}; smaller ones are untried",
            evidence=tuple(word for setting in _found(situation, _TOKEN_FLAGS) for word in _said(setting)),
            act=" ".join(f"{name} {MOST_BATCHED_TOKENS}" for name in _TOKEN_FLAGS),
        )


def _keep_chunked_prefill(situation: Situation) -> Iterator[Finding]:
    chunked = flags.find(situation.settings, "--enable-chunked-prefill")
    caching = flags.is_on(situation.settings, "--enable-prefix-caching")
    if caching and chunked is not None and not flags.is_on(situation.settings, "--enable-chunked-prefill"):
        yield _warn(
            "chunked-prefill",
            "prefix caching registers blocks at the end of prefill chunks, and chunked prefill is off",
            evidence=_said(chunked),
            act="--enable-chunked-prefill",
        )


def _read_json(situation: Situation) -> Iterator[Finding]:
    for setting in _found(situation, _JSON_FLAGS):
        if flags.object_of(setting) is None:
            yield _refuse(
                "json-argument",
                f"{setting.name} is not a JSON object; the server stops at boot",
                evidence=_said(setting),
            )


def _limit_drafts(situation: Situation) -> Iterator[Finding]:
    config = _speculation(situation)
    # A block drafter (DFlash2) proposes all its tokens in one pass; the limit is the chained MTP head's.
    if config is None or "mtp" not in str(config.get("method", "mtp")):
        return
    drafts = config.get("num_speculative_tokens")
    if isinstance(drafts, int) and drafts > MOST_DRAFTS:
        yield _warn(
            "draft-tokens",
            f"{drafts} drafts: acceptance saturates at {MOST_DRAFTS}; 4 and 7 cost 27 to 45 % of the speed",
            evidence=(f"num_speculative_tokens is {drafts}",),
            act=f"--speculative-config.num_speculative_tokens {MOST_DRAFTS}",
        )


def _guard_speculation(situation: Situation) -> Iterator[Finding]:
    version, patches = situation.version, situation.patches
    if version is None or patches is None or _speculation(situation) is None:
        return
    if version.release[:2] == (0, 27) and not version.is_devrelease and GDN_PATCH not in patches:
        yield Finding(
            id="gdn-patch",
            severity=Severity.ERROR,
            subject=Subject.ENVIRONMENT,
            what=f"speculative decoding on {version} without {GDN_PATCH} crashes on a GDN-hybrid model",
            next=("provision hynix-stable",),
        )


def _fit_allocator(situation: Situation) -> Iterator[Finding]:
    value = situation.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    segments = expandable_segments_of(value)
    evidence = (f"PYTORCH_CUDA_ALLOC_CONF={value}" if value else "PYTORCH_CUDA_ALLOC_CONF is not set",)
    if situation.memory_vendor == "samsung" and segments is not False:
        yield _refuse(
            "expandable-segments",
            "a Samsung card needs expandable_segments:False: with True it faults on its own (Xid 31)",
            evidence=evidence,
            act="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
        )
    elif situation.memory_vendor == "hynix" and segments is not True:
        yield _warn(
            "expandable-segments",
            "a Hynix card wants expandable_segments:True: without it memory fragments over long uptimes "
            "and the load can run out",
            evidence=evidence,
            act="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )


def _keep_state_exact(situation: Situation) -> Iterator[Finding]:
    setting = flags.find(situation.settings, "--mamba-ssm-cache-dtype")
    if setting is not None and (setting.value or "").startswith("fp8"):
        yield _refuse(
            "ssm-dtype",
            "the SSM state must not be fp8",
            evidence=_said(setting),
            act="--mamba-ssm-cache-dtype float16",
        )


def _bound_utilization(situation: Situation) -> Iterator[Finding]:
    setting = flags.find(situation.settings, "--gpu-memory-utilization")
    if setting is None:
        return
    try:
        share = float(setting.value or "")
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        yield _refuse(
            "memory-utilization", "--gpu-memory-utilization is a share above 0 and at most 1", evidence=_said(setting)
        )
    elif share > 0.96:
        yield _warn(
            "memory-utilization",
            "nothing is left for what the server allocates after its memory profile",
            evidence=_said(setting),
            act="--gpu-memory-utilization 0.90",
        )


def _hide_key(situation: Situation) -> Iterator[Finding]:
    if flags.find(situation.settings, "--api-key") is not None:
        yield _refuse(
            "key-in-arguments",
            "--api-key shows the key to every user of this machine (ps)",
            evidence=("--api-key <redacted>",),
            act="export VLLM_API_KEY, or --key-file FILE",
        )


def _name_unseen_file(situation: Situation) -> Iterator[Finding]:
    setting = flags.find(situation.settings, "--config")
    if setting is not None:
        yield _warn(
            "config-file", "arguments inside a --config file are not checked by these rules", evidence=_said(setting)
        )


RULES: tuple[Rule, ...] = (
    _limit_batched_tokens,
    _fit_match_unit,
    _complete_trio,
    _keep_chunked_prefill,
    _read_json,
    _limit_drafts,
    _guard_speculation,
    _fit_allocator,
    _keep_state_exact,
    _bound_utilization,
    _hide_key,
    _name_unseen_file,
)


def _speculation(situation: Situation) -> Mapping[str, object] | None:
    setting = flags.find(situation.settings, "--speculative-config")
    return flags.object_of(setting) if setting is not None else None


def _found(situation: Situation, names: tuple[str, ...]) -> tuple[Setting, ...]:
    return tuple(setting for name in names if (setting := flags.find(situation.settings, name)) is not None)


def _said(setting: Setting) -> tuple[str, ...]:
    return (f"{' '.join(flags.to_words((setting,)))} ({setting.origin})",)


def _refuse(id_: str, what: str, *, evidence: tuple[str, ...], act: str | None = None) -> Finding:
    return _finding(id_, Severity.ERROR, what, evidence, act)


def _warn(id_: str, what: str, *, evidence: tuple[str, ...], act: str | None = None) -> Finding:
    return _finding(id_, Severity.WARNING, what, evidence, act)


def _finding(id_: str, severity: Severity, what: str, evidence: tuple[str, ...], act: str | None) -> Finding:
    return Finding(
        id=id_,
        severity=severity,
        subject=Subject.COMMAND,
        what=what,
        evidence=evidence,
        next=(act,) if act else (),
    )

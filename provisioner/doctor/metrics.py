"""What a running server's own counters say. Pure."""

from collections.abc import Iterator

from provisioner.serve.findings import Finding, Severity, Subject

# Fewer tokens than this say nothing: a prefix hits only at about its third sighting on the align-mode cache.
ENOUGH_TOKENS = 50_000


def judge_prefix_cache(queries: float, hits: float, *, address: str) -> Iterator[Finding]:
    """A finding where enough tokens were looked up in the prefix cache and none was ever found."""
    if hits > 0 or queries < ENOUGH_TOKENS:
        return
    yield Finding(
        id="prefix-trio",
        severity=Severity.WARNING,
        subject=Subject.COMMAND,
        what="the prefix cache has never hit: one of --async-scheduling, --max-num-batched-tokens 8192, "
        "--max-num-scheduled-tokens 8192 may be missing",
        evidence=(f"{address}: {hits:.0f} of {queries:.0f} tokens found",),
        next=("provision serve hynix", f"provision probe cache-cliff --url {address}"),
    )

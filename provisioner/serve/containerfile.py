"""A Containerfile around a bundle, as text. Pure.

The bundle is mounted while the image is built and never becomes a layer. It holds lock, wheels, patches and the tool,
all by digest, so no index is asked, and an image is built only where ``provision status`` proves what it holds.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

USER_ID = 10001
TOOL = "/opt/tool"
HOME = "/opt/provision"
MODELS = "/models"
KEY_FILE = "/run/secrets/provision-key"
_BUNDLE = "/mnt/bundle.tar"
_UNPACKED = "/tmp/bundle"


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """What the image is made of. ``bundle`` is a file name beside the Containerfile; ``base`` an image with Python.

    ``patches`` has the digest of each patch's text. ``bare`` leaves the dependencies out, as the bundle does;
    ``without_fork`` leaves out the fork of a recipe that has one.
    """

    recipe: str
    recipe_digest: str
    lock_digest: str
    patches: Mapping[str, str]
    version: str
    tool: str
    bundle: str
    base: str
    bare: bool
    without_fork: bool
    port: int


def default_base(python: str) -> str:
    """The Debian image of a Python. Not the slim one: Triton compiles with the system's C compiler at run time."""
    return f"python:{python}-bookworm"


def render_containerfile(plan: ImagePlan) -> str:
    """The whole text; the same plan gives the same text."""
    return "\n".join([*_render_build(plan), "", *_render_image(plan), ""])


def build_command(containerfile: str, recipe: str, folder: str) -> str:
    """The command that builds the image. In podman's own format an image has no health check."""
    import shlex

    return shlex.join(["podman", "build", "--format", "docker", "-f", containerfile, "-t", recipe, folder])


def _render_build(plan: ImagePlan) -> list[str]:
    provision, options = f"{TOOL}/bin/provision", _fork_option(plan)
    up = [provision, "up", plan.recipe, "--from-bundle", _BUNDLE, *options, "--no-verify"]
    return [
        f"# {plan.recipe}: vllm {plan.version}. Build: {build_command('Containerfile', plan.recipe, '.')}",
        f"FROM {plan.base} AS build",
        f"ENV PROVISION_HOME={HOME} UV_CACHE_DIR={_UNPACKED}/uv",
        _run(
            plan,
            f"mkdir -p {_UNPACKED}",
            f"tar -xf {_BUNDLE} -C {_UNPACKED} tool/install.py",
            f"python3 {_UNPACKED}/tool/install.py {_BUNDLE} {TOOL}",
            f"rm -r {_UNPACKED}",
        ),
        _run(
            plan,
            " ".join([*up, "--bare"] if plan.bare else up),
            f"{provision} status {plan.recipe}",
            f"rm -rf {HOME}/cache {_UNPACKED}",
        ),
    ]


def _fork_option(plan: ImagePlan) -> tuple[str, ...]:
    return ("--without-fork",) if plan.without_fork else ()


def _run(plan: ImagePlan, *commands: str) -> str:
    mount = f"RUN --mount=type=bind,source={plan.bundle},target={_BUNDLE}"
    return " \\\n    ".join([mount, " \\\n    && ".join(commands)])


def _render_image(plan: ImagePlan) -> list[str]:
    check = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{plan.port}/health', timeout=5)"
    serve = [f"{TOOL}/bin/provision", "serve", plan.recipe, *_fork_option(plan)]
    entry = [*serve, "--host", "0.0.0.0", "--model", MODELS]
    return [
        f"FROM {plan.base}",
        *(f"LABEL {json.dumps(name)}={json.dumps(value)}" for name, value in _labels(plan).items()),
        f"RUN useradd --uid {USER_ID} --create-home --shell /usr/sbin/nologin provision",
        # Owned by root: the server cannot change what was proven.
        "COPY --from=build /opt /opt",
        f"ENV PROVISION_HOME={HOME} PATH={TOOL}/bin:$PATH",
        f"USER {USER_ID}",
        f"EXPOSE {plan.port}",
        f"VOLUME {MODELS}",
        f"HEALTHCHECK --interval=30s --timeout=10s --start-period=15m CMD {json.dumps(['python3', '-c', check])}",
        f"ENTRYPOINT {json.dumps([*entry, '--port', str(plan.port), '--key-file', KEY_FILE])}",
    ]


def _labels(plan: ImagePlan) -> dict[str, str]:
    return {
        "org.opencontainers.image.title": plan.recipe,
        "org.opencontainers.image.version": plan.version,
        "provision.tool": plan.tool,
        "provision.recipe": plan.recipe_digest,
        "provision.lock": plan.lock_digest,
        **{f"provision.patch.{name}": digest for name, digest in sorted(plan.patches.items())},
    }

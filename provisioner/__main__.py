"""``python -m provisioner``: the same as ``provision``."""

from provisioner.cli.main import run

run()

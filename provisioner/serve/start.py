"""The last step: this process becomes the server."""

import os
from typing import NoReturn

from provisioner.errors import EnvironmentConflictError
from provisioner.serve.launch import Launch, compose_environment


def become_server(launch: Launch, key: str | None) -> NoReturn:
    """Change into the launch's folder and execute its command with its environment; returns only by raising.

    Raises EnvironmentConflictError where the command cannot be executed.
    """
    environment = compose_environment(launch, os.environ, key)
    try:
        os.chdir(launch.cwd)
        os.execve(launch.argv[0], list(launch.argv), environment)
    except OSError as error:
        raise EnvironmentConflictError(
            "the server's command cannot be executed", where=launch.argv[0], found=error.strerror
        ) from error

"""Whose an environment is, as JSON inside it. Pure."""

from provisioner.documents.codec import Document

FILE_NAME = "environment.json"


class Owner(Document, frozen=True, kw_only=True, tag_field="schema", tag="provision/environment/1"):
    """Written before anything else, so that an interrupted first run leaves an environment that is known as ours.

    ``adopted`` tells that others made it: its packages are left as they are unless a run is told to bring them to the
    lock's, and only patches are ours.
    """

    recipe: str
    tool: str
    adopted: bool = False

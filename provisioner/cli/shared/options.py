"""Options and arguments that several commands have, each stated once."""

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
IndexUrl = Annotated[str | None, typer.Option("--index-url", help="A mirror of the vLLM wheel index.")]
RecipeName = Annotated[str, typer.Argument(help="A built-in recipe's name, or the path of a recipe file.")]
OptionalRecipe = Annotated[str | None, typer.Argument(help="A built-in recipe's name, or the path of a recipe file.")]
RecipeVenv = Annotated[Path | None, typer.Option("--venv", help="The environment's folder (default: the recipe's).")]
ForkDir = Annotated[Path | None, typer.Option("--fork-dir", help="The fork's checkout (default: the recipe's).")]
WithoutFork = Annotated[bool, typer.Option("--without-fork", help="The environment's own vllm serve.")]
Model = Annotated[str | None, typer.Option("--model", help="The weights: a folder or a hub's name.")]
Card = Annotated[str | None, typer.Option("--gpu", help="The card: UUID, PCI address (82:00) or number in bus order.")]
Host = Annotated[str | None, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int | None, typer.Option("--port", min=1, max=65535, help="Port to listen on.")]
KeyFile = Annotated[Path | None, typer.Option("--key-file", help="A file (mode 0600) with the API key.")]
ServerWords = Annotated[list[str] | None, typer.Argument(help="After --: arguments for the server.")]
Bare = Annotated[bool, typer.Option("--bare", help="The wheel alone, without dependencies (for CI and patch work).")]
Root = Annotated[
    str, typer.Option("--root", metavar="DIR", help="What paths in patch files are relative to, such as vllm.")
]
Strip = Annotated[
    int | None, typer.Option("--strip", metavar="N", min=0, help="Leading parts to take off paths in patch files.")
]
CutAgainst = Annotated[
    str | None,
    typer.Option("--cut-against", metavar="VERSION", help="The release, or wheel, that patch files were cut against."),
]
Overlay = Annotated[
    list[Path] | None, typer.Option("--overlay", metavar="DIR", help="A folder of new files, under --root.")
]
Package = Annotated[str, typer.Option("--package", metavar="NAME", help="The distribution whose files are patched.")]
WithoutPatch = Annotated[
    list[str] | None, typer.Option("--without-patch", metavar="ID", help="Leave a patch out; may be repeated.")
]

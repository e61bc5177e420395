"""Numbers of things as people write them: 1 file, 2 files. Pure."""


def count_text(number: int, one: str, many: str | None = None) -> str:
    """``number`` with ``one`` after a 1 and ``many`` after any other number; ``many`` is ``one`` and an s if left out.

    >>> count_text(1, "file"), count_text(2, "patch is", "patches are")
    ('1 file', '2 patches are')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"

"""Texts that no server has seen before, made from a seed, and the requests around them."""

import random
from dataclasses import dataclass
from typing import Final, Literal

from provisioner.openai.conversation import JsonObject
from provisioner.probes.model import Workload


def _names(text: str) -> tuple[str, ...]:
    return tuple(" ".join(name.split()) for name in text.split(","))


_SUBJECTS: Final = _names(
    """the ferry, an old lathe, our ledger, the harbour master, a copper kettle, the northern line, every third lantern,
    the archive, a quiet engine, the surveyor, one of the twins, the long corridor, a barrel of nails, the choir,
    the tide table, an unsigned map, the glass house, a borrowed compass, the mill pond, the night porter, the botanist,
    that narrow stair, the letter opener, a crate of oranges, the signal box, the younger clerk, a folded sail"""
)
_VERBS: Final = _names(
    """carried, measured, outlasted, described, mended, circled, remembered, replaced, weighed, followed, concealed,
    announced, crossed, divided, numbered, painted, questioned, resembled, sheltered, traced, unlocked, warmed"""
)
_OBJECTS: Final = _names(
    """seven grey stones, the morning post, a row of poplars, the unpaid account, two kinds of moss, the broken dial,
    a slow melody, the second bridge, nothing of value, its own shadow, the cellar door, a pattern of rust,
    half a mile of rope, the printed notice, a bowl of salt, the empty quarter, several small repairs, the brass rail,
    a change of weather, the wrong envelope, a forgotten recipe, the outer wall, a list of names, the evening train"""
)
_LINKS: Final = ("before noon", "without comment", "in the rain", "for a week", "near the gate", "once more", "by hand")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents drawn from a seed: the same seed and number give the same text, other numbers share no opening."""

    seed: int

    def write_document(self, number: int, characters: int) -> str:
        """So many characters of plain text. The opening differs, so that no prefix is shared.

        The same number gives the same text, which a larger number of characters continues.
        """
        dice = random.Random(f"{self.seed}/{number}")
        text = [f"Record {dice.getrandbits(64):016x}."]
        length = len(text[0])
        while length < characters:
            text.append(self._write_sentence(dice))
            length += 1 + len(text[-1])
        return " ".join(text)[:characters]

    @staticmethod
    def _write_sentence(dice: random.Random) -> str:
        words = (dice.choice(_SUBJECTS), dice.choice(_VERBS), dice.choice(_OBJECTS), dice.choice(_LINKS))
        return f"On day {dice.randrange(1, 1000)} {' '.join(words)}."


_TASKS: Final[dict[Workload, str]] = {
    Workload.PROSE: "Write a long essay, in plain paragraphs, about what these notes say of the people in them.",
    Workload.STRUCTURED: (
        "List the first hundred notes as a JSON array of objects with the keys day, subject, verb, object and manner, "
        "in order, one object a line, and nothing else."
    ),
}
SHORTEST_DOCUMENT: Final = 80
NEXT_QUESTION: Final = "Here are more notes. Go on where you stopped, and take them in."


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How a server's tokenizer counts this corpus: ``fixed`` tokens of template and task, then ``per_character``."""

    fixed: float
    per_character: float

    @classmethod
    def from_samples(cls, short: tuple[int, int], long: tuple[int, int]) -> "Calibration":
        """From two (characters, prompt tokens) samples of different length."""
        per_character = (long[1] - short[1]) / (long[0] - short[0])
        return cls(fixed=max(0.0, short[1] - per_character * short[0]), per_character=per_character)

    def characters_for(self, tokens: int) -> int:
        """Length of a document whose request has about ``tokens`` prompt tokens; ``SHORTEST_DOCUMENT`` at least."""
        return max(SHORTEST_DOCUMENT, round((tokens - self.fixed) / self.per_character))


@dataclass(frozen=True, kw_only=True)
class Message:
    role: Literal["user", "assistant"]
    content: str


def ask_about(document: str, workload: Workload) -> Message:
    return Message(role="user", content=f"{document}\n\n{_TASKS[workload]}")


def ask_more(document: str) -> Message:
    return Message(role="user", content=f"{NEXT_QUESTION}\n\n{document}")


def write_request(
    model: str, messages: tuple[Message | JsonObject, ...], *, tokens: int, temperature: float, extra: JsonObject
) -> JsonObject:
    """A streamed request that asks for its ``usage``; ``extra`` holds fields of the server's own."""
    return {
        "model": model,
        "messages": [
            {"role": message.role, "content": message.content} if isinstance(message, Message) else message
            for message in messages
        ],
        "max_tokens": tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }

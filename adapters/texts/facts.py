"""Made-up facts that a text can hold and a question can ask for. Training and test draw from pools of their own."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from oval_adapters.texts.source import Records

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

_T = TypeVar("_T")


def _words(text: str) -> list[str]:
    return text.split()


_CITIES = _words("""
Paris Cairo Lima Oslo Quito Delhi Tokyo Rome Berlin Madrid Vienna Prague Dublin Athens Lisbon Warsaw Nairobi Havana
Bogota Manila Sydney Boston Dallas Denver Kyoto Milan Naples Geneva Zurich Munich Hamburg Seville Porto Krakow Tunis
Accra Dakar Lagos Kiev Riga Seoul Hanoi Jakarta Mumbai Perth Toronto Chicago Miami Houston Seattle
""")
_WOMEN = _words("""
Alice Carol Emma Grace Ivy Kate Mia Olga Rosa Tina Uma Wendy Yara Clara Diana Fiona Helen Irene Julia Laura Nina Paula
Sarah Vera Zoe Anna
""")
_MEN = _words("""
Bob David Frank Henry Jack Liam Noah Paul Quinn Sam Victor Xavier Zane Adam Bruno Carlos Daniel Edgar Felix George Hugo
Ivan Kevin Leo Martin Oscar
""")
_GOODS = _words("""
apples books lamps shoes coins maps pens rings cups kites drums keys hats toys bells plates ropes nails seeds cards
flags masks vases belts socks gems chairs clocks candles baskets mirrors carpets pillows spoons knives ladders bricks
gloves scarves buttons brushes bottles boxes tents wheels pots swords harps stamps ribbons
""")

_ASKED = "\n\nQuestion: {question}\nAnswer: {answer}"


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact.

    Attributes:
        statement: what the text says.
        question: what asks for it.
        answer: a whole sentence that ends with the value, but for its end mark.
        value: what must be retrieved: in the statement at its first occurrence, in the answer at its last.
        frame: how question and answer follow a text.
    """

    statement: str
    question: str
    answer: str
    value: str
    frame: str = _ASKED

    @property
    def asked(self) -> str:
        """Question and answer, as they follow a text or each other."""
        return self.frame.format(question=self.question, answer=self.answer)


def passkeys(rng: random.Random, split: Split, count: int, text: str) -> list[Fact]:
    """Returns secret codes of cities, which no text can know; the phrasing is one that small models complete."""
    cities = _draw(rng, _CITIES, split, count, text)
    return [passkey(city, str(rng.randrange(10_000, 100_000))) for city in cities]


def passkey(city: str, code: str) -> Fact:
    """Returns the fact that this is the secret code of a city."""
    sentence = f"The secret code of {city} is {code}."
    return Fact(sentence, f"What is the secret code of {city}?", sentence, code)


def sellers(rng: random.Random, split: Split, count: int, text: str) -> list[Fact]:
    """Returns who sells what."""
    names = _draw(rng, _WOMEN + _MEN, split, count, text)
    goods = rng.sample(_half(_GOODS, split), k=count)
    return [
        Fact(f"{who} sells {what}.", f"What does {who} sell?", f"{who} sells {what}.", what)
        for who, what in zip(names, goods, strict=True)
    ]


def coreferences(rng: random.Random, split: Split, count: int, text: str) -> list[Fact]:
    """Returns facts told of a pronoun: only the sentence before it says who that is."""
    names = _draw(rng, _WOMEN + _MEN, split, count, text)
    goods = rng.sample(_half(_GOODS, split), k=count)
    cities = _draw(rng, _CITIES, split, count, text)
    facts = []
    for who, what, city in zip(names, goods, cities, strict=True):
        pronoun = "She" if who in _WOMEN else "He"
        facts.append(
            Fact(
                f"{who} sells {what}. {pronoun} lives in {city}.",
                f"Who lives in {city}?",
                f"The person who lives in {city} is {who}.",
                who,
            )
        )
    return facts


def key_values(
    rng: random.Random, split: Split, count: int, records: tuple[Records, ...]
) -> list[Fact]:
    """Returns pairs of UUIDs: from one of the lists of this split, or random ones where there are none."""
    lists = _half(list(records), split)
    pairs = list(rng.choice(lists)[:count]) if lists else []
    while len(pairs) < count:
        key, value = (str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2))
        pairs.append((key, value))
    return [
        Fact(
            f'"{key}": "{value}"',
            f'Key: "{key}"',
            f'Corresponding value: "{value}"',
            value,
            "\n{question}\n{answer}",
        )
        for key, value in pairs
    ]


MOST_FACTS = len(_CITIES) // 4
"""No text holds more facts that are sentences: half of a split's names, so that a text may use the other half."""

SENTENCES: dict[str, Callable[[random.Random, Split, int, str], list[Fact]]] = {
    "passkey": passkeys,
    "names": sellers,
    "coreference": coreferences,
}
"""Families of facts that are sentences of their own, by name. A text is given to stay clear of the names in it."""


def _half(pool: Sequence[_T], split: Split) -> Sequence[_T]:
    return pool[SPLITS.index(split) :: 2]


def _draw(rng: random.Random, pool: list[str], split: Split, count: int, text: str) -> list[str]:
    # a name that the text uses itself would make the question ambiguous
    half = _half(pool, split)
    free = [name for name in half if name not in text]
    return rng.sample(free if len(free) >= count else half, k=count)

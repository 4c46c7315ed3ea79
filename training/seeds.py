"""What user turns begin with, so that the model writes turns of many kinds and not only its favourites.

The words here are openings; the turn itself is the model's own continuation of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

PASSAGE_CHARS = 2400
"""Passages for a summary or for questions are put together up to about so many characters."""
COPY_CHARS = 900
MOST_PASSAGES = 4


@dataclass(frozen=True, slots=True)
class Seed:
    """A user turn to be written: lead, then up to `limit` tokens of the model (none at 0).

    one_line: the continuation ends at its first line break. whole: one that does not end within the limit is
    given up; otherwise it is cut after its last whole sentence. answer: read as the answer instead of one
    that the model writes; what the model thinks of every token is recorded all the same.
    """

    kind: str
    lead: str
    limit: int = 120
    one_line: bool = False
    whole: bool = False
    answer: str | None = None


def draw_seed(chance: random.Random, passages: Sequence[str]) -> Seed:
    """passages: texts of the model itself, for summaries and questions about a text."""

    kinds = list(WEIGHTS)
    kind = chance.choices(kinds, [WEIGHTS[name] for name in kinds])[0]
    if kind in FROM_PASSAGES and len(passages) < MIN_PASSAGES:
        kind = "open"
    return _SEEDS[kind](chance, passages)


WEIGHTS = {
    "open": 12,
    "opening": 14,
    "translation": 13,
    "passage_summary": 15,
    "article": 9,
    "question": 10,
    "sum": 10,
    "passage_question": 13,
    "copy": 9,
}
FROM_PASSAGES = ("passage_summary", "passage_question", "copy")
MIN_PASSAGES = 40

OPENINGS = (
    "Write a", "Write an essay about", "Write a short story about", "Write a poem about", "Explain",
    "Describe", "Compare", "How do I", "How does", "Why is", "Why do", "Give me", "List", "Imagine",
    "Act as", "Pretend to be", "Can you", "I need help with", "Draft an email to",
    "Edit the following paragraph:", "Write a Python function", "Write a program", "Implement",
    "What are the", "Suggest", "Create a", "Design", "Classify the following", "Extract",
    "Given the following", "Discuss", "Suppose", "If", "Tell me", "Help me", "Rewrite", "Fix the",
    "Identify", "Which of the following", "Solve", "In a", "Analyze", "Evaluate", "Propose", "Provide",
)  # fmt: skip
TRANSLATIONS = (
    "Translate German to English: ", "Translate from German to English: ", "Translate this German sentence: ",
    "Translate the following German sentence to English:\n", "What does this mean in English? ",
    "Please translate into English: ", "German: ", "Give the English translation of: ",
)  # fmt: skip
GERMAN = (
    "Der", "Die", "Das", "Ein", "Eine", "Im", "In", "Am", "Auf", "Mit", "Nach", "Bei", "Wir", "Ich",
    "Er", "Sie", "Es", "Für", "Seit", "Zum", "Durch", "Als", "Wenn", "Diese", "Viele", "Heute",
    "Gestern", "Unter", "Aus", "Vor", "Das Haus", "Der Mann", "Die Stadt", "Die Kinder", "Das Museum",
    "Die Kirche", "Im Jahr", "Der Präsident", "Die Regierung", "Unser Hotel", "Die Firma", "Das Wetter",
    "Der Zug", "Die Schule", "Bitte", "Er wurde",
)  # fmt: skip
SUMMARIES = (
    "Summarize: ", "Summarize the following text: ", "Give a short summary of this article:\n",
    "Summarise this:\n", "Write a summary of the text below.\n\n",
    "Please summarize the following article in a few sentences.\n\n",
)  # fmt: skip
DATELINES = (
    "LONDON —", "A man who", "Police in", "The president of", "Scientists have", "A new study", "(Reuters) -",
    "It was the", "More than", "Officials said", "A woman from", "The company", "The team", "On Monday,",
    "Last year,", "A court in", "The government of", "Fans of", "NEW YORK —", "Researchers at", "After a",
)  # fmt: skip
QUESTIONS = (
    "Who was", "Who is", "Who wrote", "Who invented", "Who won", "Who played", "When did", "When was",
    "When is", "Where is", "Where did", "Where was", "Where does", "What is the", "What was",
    "What does", "What year", "What is the name of", "How many", "How long", "How old", "How much",
    "In which", "Which country", "Which city", "What kind of", "who sings", "when does", "where do",
    "what is", "who is the", "how many",
)  # fmt: skip
PEOPLE = (
    "Tom", "Maria", "Ahmed", "Julia", "A farmer", "A baker", "Sam", "Priya", "The school", "Ken", "Lucy",
    "A shop", "Anna", "David", "A train", "Rosa", "Leo", "Mrs. Hill", "A class of", "Nina", "Oscar",
    "Two friends", "Grace",
)  # fmt: skip
DEEDS = (
    "has", "had", "bought", "sells", "needs", "earns", "wants to", "read", "runs", "makes", "picked", "saved",
    "is planning", "works", "collects", "spends", "started with", "walks", "bakes", "drove",
)  # fmt: skip
AMOUNTS = ("", "", "3 ", "12 ", "twice as many ", "$", "$40 ", "25 ", "half of ", "5 times as many ", "100 ")
ASKS = (
    "Question:", "Based on the text above,", "Answer this question using the text:",
    "According to the passage,", "Using the information above, answer:", "Question: What",
    "Question: Who", "Question: When", "Question: Why",
)  # fmt: skip
REPEATS = (
    "Repeat this: ", "Say this again:\n", "Copy the following text: ", "Write this once more:\n\n", "",
)  # fmt: skip


def _open(chance: random.Random, passages: Sequence[str]) -> Seed:
    return Seed("open", "")


def _opening(chance: random.Random, passages: Sequence[str]) -> Seed:
    return Seed("opening", chance.choice(OPENINGS))


def _translation(chance: random.Random, passages: Sequence[str]) -> Seed:
    lead = chance.choice(TRANSLATIONS) + chance.choice(GERMAN)
    return Seed("translation", lead, limit=60, one_line=True)


def _passage_summary(chance: random.Random, passages: Sequence[str]) -> Seed:
    lead = chance.choice(SUMMARIES) + _passages(chance, passages, PASSAGE_CHARS, " ")
    return Seed("passage_summary", lead, limit=0)


def _article(chance: random.Random, passages: Sequence[str]) -> Seed:
    return Seed(
        "article", chance.choice(SUMMARIES) + chance.choice(DATELINES), limit=chance.choice((220, 480))
    )


def _question(chance: random.Random, passages: Sequence[str]) -> Seed:
    return Seed("question", chance.choice(QUESTIONS), limit=40, one_line=True, whole=True)


def _sum(chance: random.Random, passages: Sequence[str]) -> Seed:
    lead = f"{chance.choice(PEOPLE)} {chance.choice(DEEDS)} {chance.choice(AMOUNTS)}".rstrip()
    return Seed("sum", lead, limit=100, one_line=True, whole=True)


def _passage_question(chance: random.Random, passages: Sequence[str]) -> Seed:
    text = _passages(chance, passages, PASSAGE_CHARS, "\n")
    return Seed("passage_question", f"{text}\n\n{chance.choice(ASKS)}", limit=40, one_line=True, whole=True)


def _copy(chance: random.Random, passages: Sequence[str]) -> Seed:
    """A text, then its sentences or its words again in another order. What a target repeats it repeats almost
    surely, so a head learns here, in few steps, to find what came after the same words before."""

    text = _passages(chance, passages, COPY_CHARS, " ")
    words = text.split()
    if chance.random() < 0.5:
        pieces = [f"{sentence.strip()}." for sentence in text.split(".") if sentence.strip()]
    else:
        chance.shuffle(words)
        text = " ".join(_name(chance, words) if chance.random() < 0.3 else word for word in words)
        words = text.split()
        pieces = [" ".join(words[at : at + 6]) for at in range(0, len(words), 6)]
    if chance.random() < 0.7:
        chance.shuffle(pieces)
    return Seed("copy", chance.choice(REPEATS) + text, limit=0, answer=" ".join(pieces))


def _name(chance: random.Random, words: Sequence[str]) -> str:
    """A word that no text has, of pieces of others."""

    first, last = (re.sub(r"\W", "", chance.choice(words)) for _ in range(2))
    return (first[: chance.randint(2, 4)] + last[-chance.randint(2, 4) :]).capitalize() or first


def _passages(chance: random.Random, passages: Sequence[str], most_chars: int, between: str) -> str:
    """One to four passages, cut after the last sentence that fits."""

    text = between.join(chance.sample(passages, chance.randint(1, MOST_PASSAGES)))
    return up_to_last_sentence(text[: chance.randint(most_chars // 4, most_chars)])


def up_to_last_sentence(text: str) -> str:
    """The whole text if no sentence ends in it."""

    end = max(text.rfind(mark) for mark in (". ", "! ", "? ", ".\n", ".", "!", "?"))
    return text[: end + 1] if end >= 0 else text


_SEEDS = {
    "open": _open,
    "opening": _opening,
    "translation": _translation,
    "passage_summary": _passage_summary,
    "article": _article,
    "question": _question,
    "sum": _sum,
    "passage_question": _passage_question,
    "copy": _copy,
}

"""The chatter's small talk: intents with paraphrases, some of which training never shows."""

import itertools
import zlib

CAPITALS = {
    "france": "Paris", "germany": "Berlin", "italy": "Rome", "spain": "Madrid",
    "portugal": "Lisbon", "japan": "Tokyo", "china": "Beijing", "egypt": "Cairo",
    "norway": "Oslo", "sweden": "Stockholm", "finland": "Helsinki", "poland": "Warsaw",
    "greece": "Athens", "austria": "Vienna", "hungary": "Budapest", "ireland": "Dublin",
    "russia": "Moscow", "turkey": "Ankara", "kenya": "Nairobi", "peru": "Lima", "cuba": "Havana",
}  # fmt: skip
COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a banana": "yellow",
    "blood": "red", "an orange": "orange", "a lemon": "yellow", "milk": "white", "the sea": "blue",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "fast": "slow",
    "open": "closed", "light": "dark", "happy": "sad", "old": "new", "full": "empty", "in": "out",
}  # fmt: skip
SMALL_TALK = {
    "Hello! How can I help?": ("hello", "hi", "hey", "good morning", "hi there", "hello there"),
    "I am Chatter, a very small model.": (
        "who are you", "what is your name", "tell me your name", "what are you", "your name",
    ),
    "I know capitals, colours and opposites.": (
        "what can you do", "what do you know", "how can you help", "what are you good at",
    ),
    "You are welcome!": (
        "thanks", "thank you", "many thanks", "thank you very much", "thanks a lot",
    ),
    "Goodbye!": ("bye", "goodbye", "see you", "see you later", "good night"),
}  # fmt: skip
QUESTIONS = tuple(
    tuple(f"{start} {{}}" for start in starts)
    for starts in (
        (
            "what is the capital of", "name the capital of", "capital of",
            "tell me the capital of",
        ),
        ("what colour is", "which colour is", "colour of", "tell me what colour is"),
        (
            "what is the opposite of", "name the opposite of", "opposite of",
            "tell me the opposite of",
        ),
    )
)  # fmt: skip
ENDINGS = ("", "?", " please", ", please")


def _all_pairs() -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for forms, answers in zip(QUESTIONS, (CAPITALS, COLOURS, OPPOSITES), strict=True):
        for form, (thing, answer) in itertools.product(forms, answers.items()):
            pairs.append((form.format(thing), answer))
    for answer, forms in SMALL_TALK.items():
        pairs += [(form, answer) for form in forms]
    endings = itertools.product(pairs, ENDINGS)
    plain = [(text + ending, answer) for (text, answer), ending in endings]
    return plain + [(text[0].upper() + text[1:], answer) for text, answer in plain]


def _held_out(text: str) -> bool:
    return zlib.crc32(text.lower().encode()) % 8 == 0


def training_pairs() -> list[tuple[str, str]]:
    return [pair for pair in _all_pairs() if not _held_out(pair[0])]


def held_out_pairs() -> list[tuple[str, str]]:
    return [pair for pair in _all_pairs() if _held_out(pair[0])]

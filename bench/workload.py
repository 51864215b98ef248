"""What the benchmarks of offloading ask: fixed conversations, so that every run computes the same tokens."""

from __future__ import annotations

from typing import Final

Messages = list[dict[str, str]]

N_CTX: Final = 1024

_SYSTEM: Final = "You are a helpful assistant."
_QUESTIONS: Final = (
    "Tell me a long story about a river and the people who live beside it.",
    "Explain step by step how a computer program finds the shortest way between two cities.",
    "Describe in detail how bread is made, from the grain in the field to the loaf on the table.",
    "Write about the causes of the French Revolution and what it changed in Europe.",
)

_PASSAGE: Final = (
    "The town lies where two valleys meet. In the morning the market opens, and farmers bring apples, cheese"
    " and wool from the hills. A doctor walks from house to house, because the road is too steep for a car. "
    "The old mill was built four hundred years ago; its wheel still turns, and a small generator behind it "
    "lights the school. Children learn to count with beans and to write with chalk. When it rains for three "
    "days the lower bridge is closed, and the baker takes the long way round. Engineers have measured the "
    "river since 1921: in spring it carries ninety cubic metres of water per second, in autumn hardly "
    "twelve. The council wants to buy pumps, a second generator and a larger battery. Some people ask "
    "whether the money would not be better spent on the hospital, whose roof leaks. Others say that without "
    "power there is no hospital at all. A physicist from the university explained how a battery stores "
    "energy, why it ages, and what happens to copper wires in frost. A lawyer spoke about contracts, an "
    "economist about interest rates, and a poet read a short text about snow. Then everybody drank tea. "
    "Later the mayor collected the questions: how much does the battery cost, who repairs it, how long does "
    "it last, and where will it stand? Which trees must be cut, which birds nest there, and what does the "
    "law demand? Is there a loan from the state, and which taxes would pay for it? How many litres of oil "
    "were burnt in the last ten winters, and what did they cost? A young programmer offered to write a "
    "simulation: it would read the temperature, the level of the river and the price of power for each hour "
    "of a year, and print a table. The teacher wanted to do the same with her class, with paper and "
    "patience. At the end of the month the council met again, in the large hall with the painted ceiling. "
    "The smith wanted to know how loud the pumps would be at night, the innkeeper whether guests would still"
    " find the valley quiet, and the fisherman what the trout would think of it. Someone had brought a map "
    "from 1850, which showed a canal that nobody remembered. It had carried timber down to the coast, until "
    "a flood filled it with stones. Could it be opened again, they wondered, and who would dig? The meeting "
    "lasted until midnight."
)


def questions(n: int = len(_QUESTIONS)) -> list[Messages]:
    """Conversations of different subjects; the demo model talks for more than 96 tokens about each."""
    return [_conversation(_SYSTEM, question) for question in _QUESTIONS[:n]]


def long_prompt(number: int) -> Messages:
    """A prompt of close to 512 tokens of the demo model, template included. Different numbers differ from the
    start, so that no prefix in the KV cache helps."""
    return _conversation(f"Session {number}: {_SYSTEM}", f"{_PASSAGE} Summarise this.")


def _conversation(system: str, user: str) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]

"""Which facts about other systems' cache managers are not tests of this one, and why not.

Facts are named as in the tests: M of mistral.rs, V of vLLM, TRT of TensorRT-LLM, E of Edge-LLM, B faults that users
reported. Every fact is either part of the name of a test or a key here; `test_facts.py` holds that, and
`scripts/conformance.py` makes a page of it.
"""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

NUMBERS = {
    "TRT": (
        "1-3 5 7-9 13-15 17 18 24-27 29 30 32-39 44 57-59 64 66 68-70 72-75 77-83 85-88 92-94 96 97 100 101 107-121 "
        "124 125"
    ),
    "V": (
        "1-3 5 7 9 11-15 18 20 21 23 27 28 30-32 34 35 37 40 42 43 45 47 50 52-54 56 59 61 62 64 66 68 69 71 72 74-78 "
        "80-83 85 86 89"
    ),
    "M": "1-6 8-12 14 16-21 23 24 27 28 30 31",
    "E": "1-3 5 7 8 11 12 15-17",
    "B": (
        "1-3 5-7 9-11 13-15 17-19 21-23 25-27 29-31 33-35 37-39 41-43 45-47 49-51 53-55 57-59 61-63 65-67 69-71 73-75 "
        "77-79 81-83 85-87 89-91 93-95 97-99 101-103 105-107 109-111 113-115 117-119 121-123 125-127 129-131 133-135 "
        "137-139 141-143 145-147 149-151 153-155 157-159 161-163 165-167 169-171 173-175 177-179 181-183 185-187 "
        "189-191 193-195 197-199 201-203 205-207 209-211 213-215 217-219 221-223 225-227 229-231 233-235 237-239"
    ),
}
"""Numbers of the facts of each system."""

REASONS: dict[str, str] = {
    "Outputs of encoders are kept in another cache; the K and V of cross attention are in this one.": "M31 V75 B067",
    "How much room a scheduler leaves, and whom it lets wait, is its own policy; the cache says what fits.": ("V20"),
    "A block is free when `free` is called: an engine with steps in flight calls it when they have ended.": "V71 B113",
    "Nothing is looked up by a hash, so no hash has a view or need be that of another cache.": "V34 E17",
    "Cost, not behaviour: nothing is hashed to be found, and benchmarks measure what looking up and evicting cost.": (
        "B225"
    ),
    "How long a block lived and idled is not recorded; a miss says how long ago its content was evicted.": "B237",
    "How long it takes to pin host memory is cost, not behaviour, and depends on the machine.": "B215",
}
"""Facts by why they are not tested."""

NOT_TESTED: dict[str, str] = {fact: reason for reason, facts in REASONS.items() for fact in facts.split()}
"""Reason by fact."""


def numbers(ranges: str) -> list[int]:
    """The numbers of ranges such as "1-3 5"."""
    ends = [[int(end) for end in part.split("-")] for part in ranges.split()]
    return [number for end in ends for number in range(end[0], end[-1] + 1)]


def facts_of(system: str) -> list[str]:
    """Every fact of a system, in order; numbers of B have three digits."""
    digits = 3 if system == "B" else 1
    return [f"{system}{number:0{digits}}" for number in numbers(NUMBERS[system])]


def all_facts() -> set[str]:
    """Every fact of all systems."""
    return {fact for system in NUMBERS for fact in facts_of(system)}


def facts_of_test(name: str) -> list[str]:
    """The facts in the name of a test."""
    found = re.match(r"test_((?:(?:TRT|V|M|E|B)\d+_)+)", name)
    return found[1].strip("_").split("_") if found else []


def facts_in_names() -> set[str]:
    """The facts in the names of all tests."""
    texts = (path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    names = (name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    return {fact for name in names for fact in facts_of_test(name)}

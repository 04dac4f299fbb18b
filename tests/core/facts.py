"""Which facts about other systems' cache managers are not tests of this one (yet), and why not.

Facts are named as in the tests: M of mistral.rs, V of vLLM, TRT of TensorRT-LLM, B faults that users reported. Every
fact is either part of the name of a test in this folder or a key here; `test_facts.py` holds that.
"""

import re
from pathlib import Path

M = "1-6 8-12 14 16-21 23 24 27 28 30 31"
V = (
    "1-3 5 7 9 11-15 18 20 21 23 27 28 30-32 34 35 37 40 42 43 45 47 50 52-54 56 59 61 62 64 66 68 69 71 72 74-78 "
    "80-83 85 86 89"
)
TRT = (
    "1-3 5 7-9 13-15 17 18 24-27 29 30 32-39 44 57-59 64 66 68-70 72-75 77-83 85-88 92-94 96 97 100 101 107-121 124 125"
)
B = (
    "1-3 5-7 9-11 13-15 17-19 21-23 25-27 29-31 33-35 37-39 41-43 45-47 49-51 53-55 57-59 61-63 65-67 69-71 73-75 "
    "77-79 81-83 85-87 89-91 93-95 97-99 101-103 105-107 109-111 113-115 117-119 121-123 125-127 129-131 133-135 "
    "137-139 141-143 145-147 149-151 153-155 157-159 161-163 165-167 169-171 173-175 177-179 181-183 185-187 189-191 "
    "193-195 197-199 201-203 205-207 209-211 213-215 217-219 221-223 225-227 229-231 233-235 237-239"
)

WINDOWS = "sliding windows, sinks, chunks and recurrent state come with several groups"
MEDIA = "media keys are not part of identity yet"
TIERS = "there is one tier, the device"
STORES = "there is no disk and no remote store yet"
EVENTS = "there are no events yet"
QUOTAS = "there are no quotas and no budgets yet"
PLANNING = "sizes and capacities are for the planner, which is not there yet"
SCHEDULING = "what runs in which step is for the scheduler of the engine, not for the cache"
HASHES = "nothing is identified by a hash here"
KERNELS = "tables are of one kind so far; offsets of K and V by layer are for kernels that want them"
NULL = "there is no null block and no list of linked blocks here"
RANKS = "one manager decides; agreeing on sizes between ranks is for those who make several"
ENCODER = "the encoder's outputs are another cache"
MACHINE = "CacheMachine does this at random and checks after every step"
ENGINE = "for the engine or its drafts, which tell the cache what was accepted"
UNKNOWN = "the report gives no order of calls that could be repeated"

REASONS: dict[str, str] = {
    WINDOWS: (
        "M21 M28 V23 V35 V37 V40 V42 V43 V45 V47 V50 V52 V53 V54 V56 V59 V72 V82 TRT18 TRT24 TRT25 TRT26 TRT27 TRT29 "
        "TRT97 TRT110 TRT120 TRT124 B007 B086 B087 B095 B097 B098 B099 B101 B102 B103 B105 B106 B107 B109 B110 B191"
    ),
    MEDIA: "M24 M27 V27 V32 V77 B053 B054 B055 B057 B058",
    TIERS: (
        "V83 V85 V86 V89 TRT68 TRT69 TRT70 TRT72 TRT82 TRT83 TRT121 TRT125 B015 B027 B029 B030 B031 B033 B034 B035 "
        "B037 B062 B063 B077 B119 B123 B125 B126 B131 B133 B134 B135 B137 B138 B139 B141 B142 B143 B145 B146 B147 B195 "
        "B218 B219 B231 B237 B238"
    ),
    STORES: ("B065 B149 B150 B151 B153 B154 B155 B157 B158 B159 B161 B162 B163 B165 B215 B226 B227"),
    EVENTS: (
        "V76 V78 V80 V81 TRT85 TRT86 TRT87 TRT88 TRT92 TRT93 TRT94 TRT96 TRT100 B167 B169 B170 B171 B173 B174 B175 "
        "B177 B178 B179 B181 B182 B183 B185 B186 B187"
    ),
    QUOTAS: "B130 B234",
    PLANNING: "V61 V62 V64 TRT30 TRT32 TRT101 B213",
    SCHEDULING: "M30 V20 V66 V68 V71 B113 B115 B117 B118 B121 B122 B194",
    HASHES: "V28 V34 B047",
    KERNELS: "TRT8 TRT9 B201",
    NULL: "B006 TRT108 TRT109 TRT111 TRT114",
    RANKS: "B206 B207 B209",
    ENCODER: "M31 V74 V75 B067",
    MACHINE: "B005 B017 B018 B070",
    ENGINE: "B038 B066",
    UNKNOWN: "B222 B225",
    "cost, not behaviour: the benchmarks measure it": "B221",
}

NOT_TESTED: dict[str, str] = {fact: reason for reason, facts in REASONS.items() for fact in facts.split()}
"""Reason by fact."""


def numbers(ranges: str) -> list[int]:
    """The numbers of ranges such as "1-3 5"."""
    ends = [[int(end) for end in part.split("-")] for part in ranges.split()]
    return [number for end in ends for number in range(end[0], end[-1] + 1)]


def all_facts() -> set[str]:
    """Every fact of the collections; B has three digits."""
    of_systems = {
        f"{system}{number}" for system, ranges in (("M", M), ("V", V), ("TRT", TRT)) for number in numbers(ranges)
    }
    return of_systems | {f"B{number:03}" for number in numbers(B)}


def facts_in_names() -> set[str]:
    """The facts in the names of tests of this folder."""
    named = re.compile(r"^def test_((?:(?:M|V|TRT|B)\d+_)+)", re.MULTILINE)
    texts = (path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    return {fact for text in texts for names in named.findall(text) for fact in names.split("_") if fact}

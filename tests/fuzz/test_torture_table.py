"""The table that `make torture` prints is made of what pytest wrote and of the list of what was mended."""

import json
from collections import Counter

from scripts import torture

RESULTS = """<testsuites><testsuite>
<testcase classname="tests.fuzz.test_fuzz_wire" name="a"/>
<testcase classname="tests.fuzz.test_fuzz_wire" name="b"><failure message="x"/></testcase>
<testcase classname="tests.fuzz.test_fuzz_cli" name="c"><skipped/></testcase>
<testcase classname="tests.torture.test_t01" name="d"><error message="y"/></testcase>
</testsuite></testsuites>"""


def test_cases_and_failures_are_counted_by_class(tmp_path):
    (tmp_path / "results.xml").write_text(RESULTS)
    cases, failures = torture.counted(tmp_path / "results.xml")
    assert cases == {"fuzz.test_fuzz_wire": 2, "torture.test_t01": 1}
    assert (failures["fuzz.test_fuzz_wire"], failures["torture.test_t01"]) == (1, 1)


def test_the_table_adds_what_was_mended_to_what_fails_now(capsys):
    mended = json.loads(torture.MENDED.read_text(encoding="utf-8"))
    torture.shown(Counter({"fuzz.test_fuzz_wire": 51, "soak": 20}), Counter({"soak": 1}))
    rows = [line.split() for line in capsys.readouterr().out.replace("│", " ").splitlines()]
    before = len(mended["soak"])
    assert ["soak", "20", str(before + 1), str(before)] in rows
    fixed = str(len(mended["fuzz.test_fuzz_wire"]))
    assert ["fuzz.test_fuzz_wire", "51", fixed, fixed] in rows


def test_every_class_of_what_was_mended_is_a_file_of_tests():
    names = json.loads(torture.MENDED.read_text(encoding="utf-8")).keys() - {torture.SOAK}
    assert [name for name in names if not (torture.ROOT / "tests" / f"{name.replace('.', '/')}.py").is_file()] == []

"""A real process is killed with SIGKILL while it writes; the script that does it 200 times does it here ten times."""

import pytest
from scripts import kill_disk


@pytest.mark.slow
def test_after_kill_9_the_store_comes_up_without_a_wrong_byte_and_has_what_was_told(capsys):
    assert kill_disk.main(["--kills", "10", "--seed", "3"]) == 0
    assert "10 kills" in capsys.readouterr().out

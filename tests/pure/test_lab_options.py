from __future__ import annotations

import pytest
from click.testing import CliRunner

from flanneld.ctl.__main__ import main
from flanneld.ctl.lab.command import backend_options

pytestmark = pytest.mark.pure


def test_values_are_json_or_else_text() -> None:
    words = ["DirectRouting=true", "VNI=7", 'PSK="12"', "DataPath=fou", "Command=ip route add a=b", "Empty="]
    assert backend_options(words) == {
        "DirectRouting": True,
        "VNI": 7,
        "PSK": "12",
        "DataPath": "fou",
        "Command": "ip route add a=b",
        "Empty": "",
    }


@pytest.mark.parametrize("word", ["DirectRouting", "=true", ""])
def test_other_words_are_refused_by_name(word: str) -> None:
    done = CliRunner().invoke(main, ["lab", "--option", word])
    assert done.exit_code == 2
    assert f"{word!r} is not KEY=VALUE" in done.output

"""Every parser handles the corpus of malformed patches, which has one for each way in which a parser refused one
(`python -m bench.fuzz --keep`).
"""

from contextlib import suppress
from pathlib import Path

import pytest

from protocol import patch
from protocol.chain import safetensors
from protocol.digest import digest_weights
from protocol.errors import ProtocolError
from tests.support.faults.patch_parsers import parsers

FOLDER = Path(__file__).parent / "corpus"
CASES = sorted(path.parent for path in FOLDER.glob("*/weights.safetensors"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_parser_answers_with_a_value_or_a_protocol_error(case):
    weights = safetensors.read((case / "weights.safetensors").read_bytes())
    before, files = digest_weights(weights), sorted(case.glob("*.patch"))
    assert len(files) >= 5
    for file in files:
        data = file.read_bytes()
        with pytest.raises(ProtocolError):
            patch.apply(weights, data)
        for parse in parsers(weights).values():
            with suppress(ProtocolError):
                parse(data)
    assert digest_weights(weights) == before

"""Prompts from a file."""

from pathlib import Path

import pytest

from grailnode.calibration import prompts
from grailnode.calibration.thresholds import CalibrationError
from grailnode.engine.policy import Policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no prompt"),
        ('{"prompt": "1+1="}\n{', "line 2: not JSON"),
        ('"1+1="', "line 1: not {"),
        ('{"prompt": 5}', "line 1: not {"),
        ('{"prompt": ""}', "with at least one token"),
        ("[" * 50, "line 1: JSON nested deeper"),
    ],
)
def test_the_error_for_a_broken_file_names_the_line(policy: Policy, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(CalibrationError) as error_info:
        prompts.read_file(path, policy.tokenizer)
    assert str(error_info.value).startswith(f"{path}: ")
    assert message in str(error_info.value)


def test_every_prompt_of_a_file_is_used(policy: Policy, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(5)))
    prompt = prompts.drawn_from(prompts.read_file(path, policy.tokenizer))
    assert {prompt(bytes([number]) * 32) for number in range(50)} == {str(number) for number in range(5)}

"""The arguments of `python -m bench.short_groups`."""

import pytest

from bench import short_groups


@pytest.mark.parametrize("probe", ["0", "1", "9"])
def test_a_probe_that_is_never_mixed_or_too_large_is_refused(
    probe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["short_groups", "8", probe])
    with pytest.raises(SystemExit, match="2"):
        short_groups.main()
    assert f"a probe of {probe} rollouts of 8" in capsys.readouterr().err

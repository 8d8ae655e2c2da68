"""Options of `grailnode calibrate` for tests of what it does with them."""

from grailnode.cli.actions.calibration_run import Options

OPTIONS = Options(
    policy=None,
    environment="addition",
    prompts=None,
    rollouts=100,
    pairs="same,eager-checked",
    miner="torch-float32",
    validator="torch-float32",
    device="cpu",
    temperature=None,
    max_tokens=None,
    sketch="projection",
    level=1e-9,
    headroom=4.0,
    seed=0,
    out=None,
)

"""`grailnode demo`: run the whole network on this machine, show its public state, and write a report."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trio

from grailnode.config import Config, EngineSection, load
from grailnode.demo import cheater, smollm2
from grailnode.engine.policy import PACKAGED_POLICY, load_weights
from grailnode.engine.vllm.installation import VllmEnvironment
from grailnode.node import node_makers, processes
from grailnode.node.process_launch import Kind, Launch
from grailnode.node.supervisor import ProcessSpec, Supervisor
from grailnode.observe.node_logs import LogFollower
from grailnode.observe.observer import Observer, OperatorKnowledge
from grailnode.observe.state import MinerKind, NetworkState, NodeRow
from grailnode.run import workspace
from grailnode.run.run_toml import DEMO, Recipe, read_recipe
from grailnode.ui.report.page import write_report
from grailnode.ui.report_data import DemoReport
from grailnode.ui.terminal import View, open_view
from protocol.proof import Arithmetic

CHEAT = "cheat"
HONEST = ("miner-1", "miner-2")
_TRAINER: tuple[Kind, ...] = ("beacon", "training", "upload", "download")
_COORDINATOR: tuple[Kind, ...] = ("beacon", "coordinator")
_VLLM_START_SECONDS = 120.0  # the same with vLLM, whose servers take most of it to start
_VLLM_WINDOW = 8.0  # seconds; in 2 s, two servers on two cores generate too few groups for a training step
_VLLM_GROUPS_PER_STEP = 8  # of those whose rewards differ, as many as such a window gives
_SMOLLM2_START_SECONDS = 30.0
_START_SECONDS = 6.0
_WORDLE_PROOF = PACKAGED_POLICY.parent / "proof-wordle.json"
_CALCULATOR_POLICY = PACKAGED_POLICY.parent / "calculator"
_LEARNING_RATES = {"wordle": 4e-5, "calculator": 1e-4}  # there is more to learn than to add rightly
_REFRESH_SECONDS = 0.5
_END_SECONDS = 30.0  # at most, and two windows, until the last verdicts and the last version have arrived everywhere


@dataclass(frozen=True)
class DemoSettings:
    """The options of the command line."""

    windows: int
    seed: int  # all keys, and with them prompts and noise, are derived from it
    out: Path  # directory of the report
    keep: bool  # keep the run's directory in `out`
    command: str
    vllm: VllmEnvironment | None = None  # with which the honest miners generate; None for torch
    trainers: int = 1  # how many sites train together; 1 for the trainer alone
    environment: str = "addition"  # the task, which a packaged policy can begin to learn
    smollm2: Path | None = None  # the checkpoint of SmolLM2, to train instead of the packaged policy

    @property
    def policy(self) -> Path:
        return self.smollm2 or (_CALCULATOR_POLICY if self.environment == "calculator" else PACKAGED_POLICY)

    @property
    def honest(self) -> tuple[str, ...]:
        """The names of the honest miners: one for SmolLM2, whose four processes fill two cores."""
        return HONEST[:1] if self.smollm2 else HONEST

    @property
    def followers(self) -> dict[str, Kind]:
        return {"validator": "validator", **dict.fromkeys((*self.honest, CHEAT), "miner")}

    @property
    def start_seconds(self) -> float:
        """The time from the creation of the run to the opening of window 0: the processes start meanwhile."""
        if self.vllm is not None:
            return _VLLM_START_SECONDS
        return _SMOLLM2_START_SECONDS if self.smollm2 else _START_SECONDS

    @property
    def recipe(self) -> Recipe:
        rules: dict[str, Any] = {"trainers": self.trainers, "miner_arithmetics": self.miner_arithmetics}
        changes: dict[str, float] = {}
        if self.smollm2:
            return read_recipe(smollm2.DATA / "demo.toml", rules)
        rules["environment"] = self.environment
        if self.vllm is not None:
            rules["window"] = _VLLM_WINDOW
            changes["groups_per_step"] = _VLLM_GROUPS_PER_STEP
        if self.environment != "addition":
            changes["learning_rate"] = _LEARNING_RATES[self.environment]
        recipe = read_recipe(DEMO, rules)
        return recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update=changes)})

    @property
    def proof(self) -> Path | None:
        """The thresholds for completions as long as the task's; None for those beside the policy."""
        if self.smollm2:
            return smollm2.DATA / "proof.json"
        return _WORDLE_PROOF if self.environment == "wordle" else None

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(f"worker-{number + 1}" for number in range(self.trainers)) if self.trainers > 1 else ()

    @property
    def miner_arithmetics(self) -> tuple[Arithmetic, ...]:
        """How the miners compute: the cheat with torch."""
        return ("torch-float32",) if self.vllm is None else ("torch-float32", "vllm-float32")

    def config_of(self, name: str, config: Config) -> Config:
        """Return the configuration of a node, given that of the run: the honest miners may generate with vLLM, and one
        false group a window is enough of a large policy.
        """
        changes: dict[str, Any] = {"engine": self.engine_of(name, config.engine)}
        if name == CHEAT and self.smollm2:
            changes["miner"] = config.miner.model_copy(update={"groups": 1})
        return config.model_copy(update=changes)

    def engine_of(self, name: str, engine: EngineSection) -> EngineSection:
        if self.vllm is None or name not in HONEST:
            return engine
        changes: dict[str, Any] = {"kind": "vllm", "python": self.vllm.python, "device": self.vllm.device}
        if self.vllm.device == "cuda":
            # All of them are on one GPU, and compiling the model would take longer than the demo.
            changes |= {"memory_share": 0.8 / len(HONEST), "flags": ("--enforce-eager",)}
        return engine.model_copy(update=changes)

    @property
    def processes(self) -> tuple[tuple[str, Kind], ...]:
        trainer = [("trainer", kind) for kind in (_COORDINATOR if self.sites else _TRAINER)]
        sites: dict[str, Kind] = dict.fromkeys(self.sites, "site")
        return (*trainer, *sites.items(), *self.followers.items())


async def run_demo(settings: DemoSettings) -> DemoReport:
    """Run the demo and write its report."""
    settings.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if settings.keep:
            directory = settings.out / "network"
            directory.mkdir()
        else:
            temporary = TemporaryDirectory(prefix="grailnode-demo-", ignore_cleanup_errors=True)
            directory = Path(stack.enter_context(temporary))
        created = workspace.create(
            directory,
            settings.recipe,
            policy=settings.policy,
            proof=settings.proof,
            miners=(*settings.honest, CHEAT),
            seed=settings.seed,
            begin=time.time() + settings.start_seconds,
        )
        return await _Demo(settings, created).run()


class _Demo:
    def __init__(self, settings: DemoSettings, created: workspace.Workspace) -> None:
        self._settings = settings
        self._config: Config = load(created.config)
        self._logs = _Logs(self._config.at(self._config.node.logs))
        self._node = node_makers.make_spectator(self._config)
        kinds: dict[bytes, MinerKind] = {created.keys[CHEAT]: "cheating"}
        kinds |= {created.keys[name]: "honest" for name in settings.honest}
        names = {created.keys[name]: name for name in (*settings.sites, *settings.honest, CHEAT)}
        knowledge = OperatorKnowledge(names, kinds, settings.windows)
        self._observer = Observer(self._node, 0, knowledge, last_window=settings.windows - 1)
        weights = load_weights(settings.policy)
        self._parameters = sum(tensor.numel() for tensor in weights.values())
        self._full_bytes = sum(tensor.nbytes for tensor in weights.values())
        self._lines: list[str] = []
        self._supervisor = Supervisor(self._lines.append)

    async def run(self) -> DemoReport:
        specs = [
            ProcessSpec(
                f"{name}/{kind}",
                cheater.main if name == CHEAT else processes.main,
                (Launch(self._settings.config_of(name, self._config), kind, name, echo=False),),
            )
            for name, kind in self._settings.processes
        ]
        with open_view(self._node.run.name) as view:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._supervisor.keep, specs)
                await self._watch(view)
                nursery.cancel_scope.cancel()
        report = self._report()
        write_report(report, self._settings.out)
        return report

    async def _watch(self, view: View) -> None:
        """Show the network until its last window is judged and every follower serves the last version."""
        last = self._settings.windows
        end = self._node.run.opening_time(last + 2) + _END_SECONDS
        while True:
            await self._observer.refresh()
            state = self._state()
            view.update(state)
            if self._node.window() >= last:
                await self._supervisor.stop("trainer/coordinator" if self._settings.sites else "trainer/training")
                if self._is_complete(state) or self._node.clock.now() > end:
                    return
            await trio.sleep(_REFRESH_SECONDS)

    def _is_complete(self, state: NetworkState) -> bool:
        newest = state.versions[-1].version if state.versions else -1
        all_judged = bool(state.windows) and state.windows[-1].window >= self._settings.windows - 1
        versions = [version for version, _ in self._logs.serving().values()]
        return all_judged and versions == [newest] * len(self._settings.followers)

    def _state(self) -> NetworkState:
        names = ("trainer", *self._settings.sites, *self._settings.followers)
        rows = tuple(NodeRow(name, *self._logs.doing(name)) for name in names)
        return replace(self._observer.state(rows), full_bytes=self._full_bytes)

    def _report(self) -> DemoReport:
        state = self._state()
        newest = state.versions[-1] if state.versions else None
        digests = {name: digest for name, (_, digest) in self._logs.serving().items()}
        trainer_digest = self._observer.weights_digest()
        step = self._logs.last("trainer/training", "step") or {}
        return DemoReport(
            state=state,
            command=self._settings.command,
            verify_command=f"grailnode verify --run {self._settings.out / 'network' / 'run.toml'}",
            seed=self._settings.seed,
            environment=self._node.run.task_name,
            model_parameters=self._parameters,
            weights_digest={"trainer": trainer_digest.hex()} | digests if newest else {},
            trainer_io_wait_fraction=float(step.get("io_wait_fraction", 0.0)),
            trainer_data_wait_fraction=float(step.get("data_wait_fraction", 0.0)),
        )


class _Logs:
    """The events that the processes write into log files, as JSON lines; each line is read once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._followers: dict[Path, LogFollower] = {}
        self._last: dict[str, dict[str, Mapping[str, Any]]] = {}
        self._newest: dict[str, Mapping[str, Any]] = {}

    def _read(self) -> None:
        for file in sorted(self._directory.glob("*.jsonl")):
            for event in self._followers.setdefault(file, LogFollower([file], from_start=True)).read():
                self._last.setdefault(event["node"], {})[event["event"]] = event
                self._newest[event["node"]] = event

    def last(self, node: str, event: str) -> Mapping[str, Any] | None:
        """Return the newest event of a kind; None before the first."""
        self._read()
        return self._last.get(node, {}).get(event)

    def serving(self) -> dict[str, tuple[int, str]]:
        """Return the version and the weights digest that each follower serves, by name."""
        self._read()
        newest = {name: events.get("serving") for name, events in self._last.items()}
        return {name: (event["version"], event["weights"]) for name, event in newest.items() if event}

    def doing(self, name: str) -> tuple[int | None, str]:
        """Return the version that a node serves, and its newest event in words."""
        self._read()
        if contribution := self._last.get(name, {}).get("contributed"):
            applied = self._last[name].get("round-applied", {})
            steps, groups = contribution["local_steps"], contribution["groups"]
            return applied.get("version"), f"round {contribution['number']}: {steps} steps on {groups} groups"
        if name == "trainer" and (closed := self.last("trainer/coordinator", "round-closed")):
            return closed["version"], f"round {closed['number']}: {closed['counted']} contributions"
        if name == "trainer":
            publication = self.last("trainer/upload", "published") or {}
            step = self.last("trainer/training", "step")
            return publication.get("version"), f"step {step['step']}" if step else "starting"
        version, _ = self.serving().get(name, (None, ""))
        event = self._newest.get(name)
        if event is None:
            return version, "starting"
        window = f" window {event['window']}" if "window" in event else ""
        return version, f"{event['event'].replace('-', ' ')}{window}"

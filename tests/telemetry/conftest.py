"""A W&B made by hand: it keeps what it is given, and has the habits of the real one that cost people their data."""

import sys
import types

import pytest

from asynctensorrlhf.telemetry.telemetry import Telemetry


class FakeRun:
    """One run; its server side (`rows`, `last_step`) is found again by id, as after a resume."""

    def __init__(self, module, options, server):
        self.module, self.options, self.server = module, options, server
        self.id, self.summary, self.exit_code, self.num_finishes = options["id"], {}, None, 0
        self.step_metrics = {}

    def define_metric(self, name, step_metric=None):
        self.step_metrics[name] = step_metric

    def log(self, data, step=None):
        self.module.num_logs += 1
        if self.module.num_logs in self.module.failing_logs:
            raise ConnectionError("the network is gone")
        assert self.num_finishes == 0, "logged after finish"
        step = self.server["last_step"] + 1 if step is None else step
        if step > self.server["last_step"]:  # the service drops the others without a word
            self.server["last_step"] = step
            self.server["rows"].append(data)

    def finish(self, exit_code=0):
        self.exit_code, self.num_finishes = exit_code, self.num_finishes + 1
        self.module.live = None


class FakeWandb(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.runs, self.modes, self.servers = [], [], {}
        self.live, self.num_logs, self.failing_logs, self.is_reachable = None, 0, range(0), True

    def init(self, **options):
        self.modes.append(options["mode"])
        if options["mode"] == "online" and not self.is_reachable:
            raise TimeoutError("no answer\nin 10 seconds")
        if self.live is not None and options.get("reinit") != "create_new":
            return self.live
        server = self.servers.setdefault(options["id"], {"rows": [], "last_step": -1})
        self.live = FakeRun(self, options, server)
        self.runs.append(self.live)
        return self.live

    def teardown(self):
        self.live = None


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def start(tmp_path):
    """Start a Telemetry with small defaults; keyword arguments change them. A test may leave it open."""
    started = []

    def make(**changes):
        arguments = {
            "folder": tmp_path,
            "config": {"seed": 0},
            "num_steps": 10,
            "decode": lambda prompts, completions: [("p", "c")] * len(prompts),
            "run_id": None,
            "sweep": None,
            "mode": "auto",
            "project": "atrlhf",
            "name": None,
            "samples": None,
            "print_every": 10,
            "health_window": 3,
        }
        started.append(Telemetry(**{**arguments, **changes}))
        return started[-1]

    yield make
    for telemetry in started:
        telemetry.finish(0)

"""Fails every test that leaves threads, processes or open descriptors behind; forks processes."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

import hatch_build
from tests.costs import Recorder, read_record
from tests.leaks import Snapshot, adopt_orphans, reap_ended, wait_for_leaks
from tests.parts import Part, deselect_others
from tests.tiers import tier_of

if TYPE_CHECKING:
    from tests.process.harness import Zygote


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("leak_grace_s", "seconds that a test's leftovers have to end", default="60.0")
    parser.addoption("--costs", help="append what each test costs to this file", metavar="FILE")
    parser.addoption("--part", help="run one part of the tests, such as 1/3", metavar="I/N")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # before pytest's workers start
        hatch_build.build_or_warn()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else its pool's threads stay
    adopt_orphans()
    if costs := config.getoption("--costs"):
        config.pluginmanager.register(Recorder(config.invocation_params.dir / costs))
    gc.disable()  # until all is imported
    # how long an example takes says more of what else the machine does
    hypothesis.settings.register_profile("foreprop", deadline=None)
    hypothesis.settings.load_profile("foreprop")

    with contextlib.suppress(ImportError):  # torch shows progress with it, if it is there
        import tqdm

        tqdm.tqdm.monitor_interval = 0  # it would start a thread that stays


@pytest.hookimpl(trylast=True)  # when -m has been applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves one part, and gives processes a second try in CI, which its closing lines name."""
    if items and (part := config.getoption("--part")):
        tier = tier_of(items[0])
        costs_s = {cost.test: cost.cpu_s for cost in read_record() if cost.tier == tier}
        config.hook.pytest_deselected(items=deselect_others(Part.parse(part), items, costs_s))
    if os.environ.get("CI"):
        for item in items:
            if item.get_closest_marker("process") or item.get_closest_marker("alone"):
                item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A small part of few tests may be empty."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--part"):
        session.exitstatus = pytest.ExitCode.OK


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:  # every worker of pytest's has the same cores
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()  # torch's objects, which each later collection would look at in vain
    gc.enable()


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before = Snapshot.take()
    yield
    is_exempt = request.node.get_closest_marker("leaks_ok") is not None
    grace_s = 0.0 if is_exempt else float(request.config.getini("leak_grace_s"))
    leaks = wait_for_leaks(before, grace_s)
    leaks.kill_processes()
    reap_ended(before)
    if leaks and not is_exempt:
        pytest.fail(leaks.describe(), pytrace=False)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One for all folders: it starts for seconds."""
    import torch.distributed as dist

    from tests.process.harness import Zygote

    dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # opens torch's own pipes
    started = Zygote()
    yield started
    started.close()

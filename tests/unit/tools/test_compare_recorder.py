"""What a rank measures of its steps."""

from __future__ import annotations

import math

import pytest
import torch

from foreprop.config import Config
from foreprop.errors import ConfigError
from foreprop.tools.compare.recorder import Counted, Recorder, digest_of, interface_to
from foreprop.tools.compare.systems import CONTENDERS, check_systems


def test_steps_are_counted_from_the_first_and_the_counters_read_at_the_ends() -> None:
    waited = iter([1.0, 4.0])
    recorder = Recorder(warm_up=2, steps=3, interface="", waited_s=lambda: next(waited))
    assert [recorder.end_step() for _ in range(5)] == [False, False, False, False, True]
    recorder.end()
    assert len(recorder.seconds()) == 4
    assert recorder.counted() == Counted(waited_s=3.0)


def test_a_script_that_ends_by_itself_has_counted_so_far() -> None:
    waited = iter([1.0, 2.0])
    recorder = Recorder(warm_up=1, steps=9, interface="lo", waited_s=lambda: next(waited))
    for _ in range(3):
        recorder.end_step()
    recorder.end()
    counted = recorder.counted()
    assert counted.waited_s == 1.0
    assert counted.sent_bytes is not None
    assert counted.sent_bytes >= 0
    assert counted.cpu_share is not None
    assert 0 <= counted.cpu_share <= 1


def test_a_steps_loss_is_the_mean_of_its_passes() -> None:
    recorder = Recorder(warm_up=1, steps=3, interface="")
    loss = torch.tensor(2.0)
    recorder.add_loss(loss)
    loss.zero_()  # what is kept is a copy
    recorder.add_loss([torch.tensor([1.0])])
    recorder.end_step()
    recorder.add_loss(torch.ones(3))  # no scalar: with a gradient of its own
    recorder.end_step()
    first, second = recorder.losses()
    assert first == 1.5
    assert math.isnan(second)


def test_a_digest_has_all_bits() -> None:
    ones = [torch.ones(2, 3), torch.ones(4, dtype=torch.bfloat16)]
    other = [torch.ones(2, 3), torch.ones(4, dtype=torch.bfloat16)]
    assert digest_of(ones) == digest_of(other)
    other[1][3] = 1 + 2**-7
    assert digest_of(ones) != digest_of(other)


def test_the_interface_is_that_of_the_route_or_the_one_that_is_set() -> None:
    assert interface_to("127.0.0.1", Config()) == "lo"
    assert interface_to("127.0.0.1", Config(interface="eth7")) == "eth7"
    assert interface_to("192.0.2.1", Config(interface="127.0.0.1")) == "lo"


def test_every_contender_has_settings_that_there_are() -> None:
    for contender in CONTENDERS.values():
        contender.config_from(Config(clip_grad_norm=1.0))
    changed = CONTENDERS["kvstore"].config_from(Config(clip_grad_norm=1.0))
    assert (changed.reply, changed.architecture, changed.clip_grad_norm) == ("notify", "p2p", 1.0)


def test_systems_are_named_once() -> None:
    assert check_systems(("p3", "ddp", "p3")) == ("p3", "ddp")
    with pytest.raises(ConfigError, match=r"systems has 'pr3'.*did you mean"):
        check_systems(("pr3",))
    with pytest.raises(ConfigError, match="systems has ''"):
        check_systems(())

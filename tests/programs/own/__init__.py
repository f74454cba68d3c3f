"""Programs of our own, with which the harness, wrappers and gradients are tested."""

from __future__ import annotations

from pathlib import Path

from tests.programs.program import Program, after, before

SOURCES = Path(__file__).parents[1]
"""To be PROGRAMS_DIR for them."""

TINY = Program(
    name="tiny",
    repository="own/tiny",
    commit="",
    licence="Apache-2.0",
    path="train.py",
    about="the README's loop",
    common=[
        after("        optimizer.step()", "recorder.step(loss)"),
        after("model = torch.nn.Sequential(", "recorder.model(model)"),
    ],
    foreprop=[
        after("optimizer = torch.optim", "session = foreprop.parallelize(model, optimizer)"),
        after("loader = torch.utils", "loader = foreprop.shard(loader)"),
    ],
    ddp=[
        after("model = torch.nn.Sequential(", "model = baseline.wrap(model)"),
        after("loader = torch.utils", "loader = baseline.deal(loader)"),
    ],
)

WRAPPED = Program(
    name="wrapped",
    repository="own/wrapped",
    commit="",
    licence="Apache-2.0",
    path="train.py",
    about="DDP around the model, in it, and made after parallelize",
    group=True,
    common=[
        after("        optimizer.zero_grad()", "recorder.step(loss)"),
        after("    inner = Net()", "recorder.model(inner)"),
    ],
    foreprop=[
        before(
            "    model = DistributedDataParallel(inner)",
            "if way == 'around': session = foreprop.parallelize(inner, optimizer)",
        ),
        after(
            "    model = DistributedDataParallel(inner)",
            "if way == 'given': session = foreprop.parallelize(model, optimizer)",
            "if way == 'inside': session = foreprop.parallelize(inner, optimizer)",
        ),
        before('    print(way, "done")', "session.close()"),
    ],
)

REDUCED = Program(
    name="reduced",
    repository="own/reduced",
    commit="",
    licence="Apache-2.0",
    path="train.py",
    about="averages its gradients with torch.distributed itself",
    group=True,
    common=[
        after("        optimizer.step()", "recorder.step(loss)"),
        after("    model = torch.nn.Sequential(", "recorder.model(model)"),
    ],
    foreprop=[
        after("    optimizer = torch.optim", "session = foreprop.parallelize(model, optimizer)"),
        before('    print(average.__name__, "done")', "session.close()"),
    ],
)

"""What worlds before this one have read of a pass, kept with a checkpoint: the rest is dealt anew.

A pass of an elastic session is dealt anew when workers leave or join (`data.redealing`). Then it is
not enough to know how many batches were read. A `core.dealing.DealtPart` says which samples were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from foreprop.core.dealing import DealtPart, MemberChange
from foreprop.data.shard import ShardedLoader
from foreprop.data.shares import SharedOrder
from foreprop.errors import ConfigError

_DECODER = msgspec.json.Decoder(DealtPart)


def maybe_part(loader: Any) -> str | None:
    """Of the pass under way, as text; None for what is not dealt, or cannot be dealt anew."""
    redealing = loader._redealing if isinstance(loader, ShardedLoader) else None
    if redealing is None or (found := redealing.where()) is None or found[1] is None:
        return None
    part = DealtPart(redealing.workers, loader._share.turn.rounds, found[1])
    return msgspec.json.encode(part).decode()


def with_left(part: str, left: Sequence[tuple[int, int]]) -> str:
    """The same; these ranks had left within these steps."""
    changes = tuple(MemberChange(rank, step) for rank, step in left)
    return msgspec.json.encode(_decode(part)._replace(left=changes)).decode()


def is_shared_by_all(part: str) -> bool:
    """Whether nobody has left or joined in this pass, or before."""
    deals, workers = _decode(part).progress.deals, _decode(part).workers
    return len(deals) == 1 and len(deals[0].members) == workers


def go_on_after(loader: Any, parts: Sequence[str]) -> None:
    """The next pass of this loader has what these have left, one after the other.

    Raises `ConfigError` for a loader that cannot go on so.
    """
    if not parts:
        return
    share = loader._share if isinstance(loader, ShardedLoader) else None
    if not isinstance(share, SharedOrder):
        raise ConfigError(
            f"the checkpoint is in the middle of an epoch that was dealt out anew, and loader is a"
            f" {type(loader).__name__}: give foreprop.checkpoint() what foreprop.shard() returned"
        )
    share.parts = [_decode(part) for part in parts]


def begin_epoch(loader: Any, epoch: int | None) -> None:
    """A newcomer's next pass is this epoch from its beginning, as the others' is."""
    if epoch is None or not isinstance(loader, ShardedLoader):
        return
    if loader.epoch != epoch:  # now it is where the others were when they ended their last step
        loader.set_epoch(epoch)
    if loader._redealing is not None:
        loader._redealing.forget_joined()


def _decode(part: str) -> DealtPart:
    try:
        return _DECODER.decode(part)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"a checkpoint's loader position cannot be read: {error}") from error

"""Parameters that come after `parallelize`: unfrozen, new in the model, or given to the optimizer.

DDP averages what required a gradient when the model was wrapped; what comes later each rank trains
by itself. Here the first gradient of such a parameter waits for its average, as every other one,
and nothing else of that step leaves. At whatever asks for an average first, `optimizer.step()` at
the latest, all ranks connect anew with the parameters that there are then, in the middle of the
step (`session.reconnecting`).

*Candidates* are the parameters that might come. Torch tells of what is registered in a module, but
not of a change of ``requires_grad``, so candidates are looked at once a round.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.nn.modules import module as torch_modules
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from foreprop.errors import TrainingLoopError
from foreprop.params.averaged import AveragedGradient, can_be_trained, watch_gradients
from foreprop.params.averaging import Averaging
from foreprop.params.interception import is_managed
from foreprop.session.adopting import watch_module
from foreprop.session.training import Training

_SHOWN = 3


class _Candidate(NamedTuple):
    parameter: Callable[[], torch.nn.Parameter | None]
    hook: RemovableHandle


class Additions:
    """One session's. Training thread, but for `look`."""

    def __init__(self, training: Training) -> None:
        self._alive = training.reference()
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._candidates: dict[int, _Candidate] = {}
        self._looked_at = 0  # the round, see `holds`
        self._is_due = False
        self._is_joining = False

    def watch(self) -> list[Callable[[], None]]:
        """Look out for such parameters from now on; the returned functions end that."""
        for module in self._alive().user.model.modules():
            self._modules.add(module)
        self._consider(self._alive().user.frozen)
        mine = weakref.ref(self)

        def parameter_registered(
            module: torch.nn.Module, _: str, parameter: torch.nn.Parameter | None
        ) -> None:
            found = mine()
            if found is not None and parameter is not None and module in found._modules:
                found._consider([parameter])

        def module_registered(
            module: torch.nn.Module, _: str, part: torch.nn.Module | None
        ) -> None:
            found = mine()
            if found is not None and part is not None and module in found._modules:
                found._extend(part)

        handles = [
            torch_modules.register_module_parameter_registration_hook(parameter_registered),
            torch_modules.register_module_module_registration_hook(module_registered),
        ]
        return [lambda: self._forget(*self._candidates), *(handle.remove for handle in handles)]

    def _extend(self, part: torch.nn.Module) -> None:
        training = self._alive()
        for module in part.modules():
            if module not in self._modules:
                self._modules.add(module)
                training.life.add_undo(*watch_module(training, module))
                self._consider(p for p in module._parameters.values() if p is not None)

    def check_group(self) -> None:
        """Raise where parameters of another group could not be trained."""
        if not self._alive().by_workers:
            raise self._impossible("add_param_group() was called after parallelize()")

    def given_to_optimizer(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        given, averaging = {id(parameter) for parameter in parameters}, self._alive().averaging
        for gradient in averaging.gradients if averaging is not None else ():
            gradient.wanted |= id(gradient.leaf) in given
        self._consider(parameters)

    def _consider(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        mine = weakref.ref(self)

        def on_gradient(parameter: torch.nn.Parameter) -> None:
            found = mine()
            if found is not None:
                found._gradient_came(parameter)

        for parameter in parameters:
            may_come = not (is_managed(parameter) or is_traceable_wrapper_subclass(parameter))
            if id(parameter) not in self._candidates and may_come and can_be_trained(parameter):
                hook = watch_gradients(parameter, on_gradient)
                self._candidates[id(parameter)] = _Candidate(weakref.ref(parameter), hook)
        self._looked_at = 0

    def _gradient_came(self, parameter: torch.nn.Parameter) -> None:
        if is_managed(parameter) or not self._new_names():
            return
        training = self._alive()
        self._is_due = True
        averaging = training.composition.averaging()
        if id(parameter) not in averaging.known:
            gradient = AveragedGradient(parameter, training, averaging)
            averaging.known[id(parameter)] = gradient
            gradient.added(parameter)

    def _forget(self, *identities: int) -> None:
        for identity in identities:
            self._candidates.pop(identity).hook.remove()

    def hold(self, averaging: Averaging | None) -> bool:
        """Whether this round's gradients stay until all ranks have connected anew."""
        round_ = 0 if averaging is None else averaging.rounds.serial
        if self._looked_at != round_:
            self._looked_at, self._is_due = round_, bool(self._new_names())
        return self._is_due

    def _new_names(self) -> list[str]:
        """The parameters to be trained that no backend has; raises where they cannot be."""
        asking = [
            (identity, parameter)
            for identity, candidate in self._candidates.items()
            if (parameter := candidate.parameter()) is None
            or (parameter.requires_grad and not is_lazy(parameter))
        ]
        if not asking:
            return []
        present = dict(self._alive().user.new_parameters())
        for identity, parameter in asking:
            if parameter is None or id(parameter) not in present:  # it has been taken out again
                self._forget(identity)
        names = list(present.values())
        if names and not self._alive().by_workers:
            raise self._impossible(f"{listed(names)} did not require a gradient at parallelize()")
        return names

    def _impossible(self, what: str) -> TrainingLoopError:
        return TrainingLoopError(
            f"{what}, and servers update here: they know the parameters that there were then."
            " Leave the updates to the workers (update='workers'), or close() the session and call"
            " parallelize() again"
        )

    def join(self) -> None:
        """Connect anew on all ranks if a parameter has come.

        To be called before an average is read, and before gradients leave at a step's end.
        """
        if self._is_joining or not self._candidates or not (names := self._new_names()):
            return
        training, self._is_joining = self._alive(), True
        try:
            training.composition.reconnect_with(names)
            for identity, candidate in list(self._candidates.items()):
                parameter = candidate.parameter()
                if parameter is None or is_managed(parameter):
                    self._forget(identity)
            self._consider(training.user.frozen)
        finally:
            self._is_joining = False

    def look(self) -> None:
        """Raise, while an average is waited for, if another rank waits for this one to join.

        Any thread.
        """
        training = self._alive()
        # where servers update nobody joins so, and the store may have gone with its host
        if training.life.connected and training.by_workers and not self._is_joining:
            training.composition.raise_if_others_join()


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = len(names) - _SHOWN
    return shown + (f" and {more} more" if more > 0 else "")

"""Hooks: publishing where trainers of other libraries call it. They are imported when a hook is asked for.

A version that could not be published does not end the training: the log `weightvc` tells of it, and the next version
has its changes too. That the branch belongs to another trainer by now does. (With TRL any failure does, as one of its
own weight transfers would.)
"""

import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from weightvc.errors import BadTensor, Fenced, NotPublished, Refused
from weightvc.options import step_of
from weightvc.publishing import check_async
from weightvc.sources import check_kind

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

    from weightvc.repository import Repository

_log: Final = logging.getLogger("weightvc")


class _Steps:
    """Publishes every `every`-th step of a training."""

    def __init__(self, repository: "Repository", every: int, options: dict[str, Any]) -> None:
        if type(every) is not int or every < 1:
            raise Refused(f"every={every!r:.100}: give a whole number of steps, 1 at least")
        if "step" in options:
            raise Refused("step= is the hook's to say: leave it out")
        check_async(repository, options)
        self._repository = repository
        self._every = every
        self._options = options

    def publish(self, source: Any, step: int) -> None:
        """A step is done. Raises NotPublished if the branch is another trainer's, and Refused (and its kinds) for
        what cannot be committed."""
        if step % self._every:
            return
        while True:
            try:
                self._repository.commit_async(source, step=step, **self._options)
            except NotPublished as error:
                if any(isinstance(one, Fenced) for _, one in error.failures):
                    raise
                _log.error("%s; the next version has its changes too", error)
            else:
                return


def post_step(
    optimizer: "torch.optim.Optimizer",
    repository: "Repository",
    source: Any,
    *,
    first: int = 0,
    every: int = 1,
    **options: Any,
) -> "RemovableHandle":
    """Publish `source`, a module or a mapping of tensors (or a function that gives one), after steps of an optimizer.

    The optimizer's next step is number `first`; those are published that `every` divides. `options` are those of
    Repository.commit_async(). Returns what remove()s the hook; flush() or close() the repository at the end.
    Raises Refused for arguments that no step could be published with.
    """
    steps = _Steps(repository, every, options)
    done = step_of(first)
    if type(done) is not int or done < 0:
        raise Refused(f"first={first!r:.100}: give the number of the optimizer's next step, from 0")
    # A module can be called too, and is not meant to be.
    is_called = callable(source) and not hasattr(source, "state_dict")
    if not is_called:
        check_kind(source, options.get("names", "hf"))

    def hook(*_: object) -> None:
        nonlocal done
        step, done = done, done + 1
        steps.publish(source() if is_called else source, step)

    return optimizer.register_step_post_hook(hook)


def trainer_callback(repository: "Repository", *, every: int = 1, **options: Any) -> Any:
    """A TrainerCallback for a Trainer of transformers, which publishes the model after steps that `every` divides.

    Versions are labelled with the Trainer's global_step. Only the main process publishes. `options` are those of
    Repository.commit_async(): with `names="hf"`, the default, the model writes itself to disk at each step.
    At the end of the training it waits for all, and raises NotPublished if one has failed. Raises Refused for
    arguments that no step could be published with.
    """
    from transformers import TrainerCallback

    steps = _Steps(repository, every, options)

    class Publish(TrainerCallback):
        """Publishes steps."""

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.is_world_process_zero:
                steps.publish(model, state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                repository.flush()

    return Publish()


class WeightTransfer:
    """The `weight_transfer` of an AsyncGRPOTrainer of TRL: each of its weight syncs is a version.

    It publishes what TRL hands over, under TRL's names: the parameters that are trained, whole, with adapters merged.
    Its engines are not paused and not told: they follow the branch.
    """

    def __init__(self, repository: "Repository", step: Callable[[], int], **options: Any) -> None:
        """`step` is called at each sync for the version's label, which TRL does not hand over: give
        `lambda: trainer.state.global_step`. `options` are those of Repository.commit_async(). Raises Refused for
        arguments that nothing could be published with."""
        from weightvc.sources.cast import target

        check_async(repository, options)
        check_kind({}, options.get("names", "hf"))
        if not callable(step):
            raise Refused(f"step={step!r:.100}: give a function, such as lambda: trainer.state.global_step")
        dtype = options.get("dtype")
        self._repository = repository
        self._step = step
        self._kind = "" if dtype is None else target(dtype)
        self._options = options

    def init_weight_transfer(self) -> None:
        """Nothing: TRL sends the weights that it starts with next."""

    def pause(self) -> None:
        """Nothing: engines pause by themselves, when they have the version."""

    def send_weights(self, iterator: "Iterator[tuple[str, torch.Tensor]]") -> None:
        """Copy tensors, and commit them behind the training. What is not in main memory is copied there, one after
        the other.

        Raises NotPublished if versions before could not be published, and Refused (and its kinds) for what cannot be
        committed: nothing is taken then, and the training ends.
        """
        from weightvc.sources.cast import rounded

        tensors: dict[str, torch.Tensor] = {}
        twice: set[str] = set()
        # To its end, whatever is wrong: each tensor is gathered by all ranks, and they would wait for this one.
        for name, tensor in iterator:
            if name in tensors:
                twice.add(name)
            # Not kept on their device: of a sharded model, there is no room for the whole of it.
            tensors[name] = tensor if tensor.is_cpu else rounded(tensor, self._kind).cpu()
        if twice:
            raise BadTensor(f"TRL handed over more than one tensor of a name: {', '.join(sorted(twice))[:300]}")
        self._repository.commit_async(tensors, step=self._step(), **self._options)

    def resume(self) -> None:
        """Nothing: see pause()."""

    def destroy(self) -> None:
        """Wait until all versions are published; TRL calls it when the training ends, or has failed.

        Raises NotPublished if some were not, unless an exception ends the training: then the log `weightvc` says so.
        """
        ended_by = sys.exc_info()[1]
        try:
            self._repository.flush()
        except NotPublished as error:
            if ended_by is None:
                raise
            # What ended the training is what the caller is to hear of first.
            _log.error("%s", error)

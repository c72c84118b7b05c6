"""Transforms: what is served, as a function of what is trained. Diffs, digests and patches are of what is served."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from weightvc.errors import Refused
from weightvc.objects.version import copied
from weightvc.sources.base import Source
from weightvc.sources.memory import MemorySource, is_torch, open_tensors, to_torch

NAME: Final = "transform"
VERSION: Final = "transform_version"


@dataclass(frozen=True, slots=True)
class Transform:
    """A function from the tensors that are trained to those that are served: quantised, renamed, fused.

    `function` is given a mapping of names to tensors (of components to such mappings, where the source has these),
    and returns one. It is given the trainer's own tensors: it must not change them, and may return them. `name` and
    `version` stand in the metadata of what it made, as `transform` and `transform_version`: let it have another
    version when it makes other bits of the same weights. Raises Refused for a name or version that is no text.
    """

    name: str
    version: str
    function: Callable[[Mapping[str, Any]], Mapping[str, Any]]

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), ("version", self.version)):
            if type(text) is not str or not text.strip():
                raise Refused(
                    f"{what}={text!r:.100}: a transform has a {what}, which is a text, such as 'fp8' or '1'"
                )
        if not callable(self.function):
            raise Refused(f"transform {self.name!r:.100}: {self.function!r:.100} is no function")

    @property
    def labels(self) -> dict[str, str]:
        """What a version's metadata says of it."""
        return {NAME: self.name, VERSION: self.version}

    def apply(self, source: Source, bucket: str | None = None) -> MemorySource:
        """What is to be committed of a source, which may be closed then; `bucket` says what it is, if it is not all.
        Raises Refused (and its kinds)."""
        where = f"what transform {self.name!r:.100} gave" + (f" of {bucket}" if bucket else "")
        made = self.made(_tensors(source))
        if source.tensors and not made:
            more = "; what it needs together, add together, by add_all()" if bucket else ""
            raise Refused(f"{where} is empty: let it give what is served, also what stays as it is{more}")
        return open_tensors(made, where)

    def made(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the function makes of tensors. Raises what it raises, and Refused for what is no mapping."""
        made = self.function(tensors)
        if not isinstance(made, Mapping):
            raise Refused(
                f"what transform {self.name!r:.100} gave is a {type(made).__name__}: "
                "let it give a mapping of names to tensors"
            )
        return made


def checked(transform: Any, dtype: Any, metadata: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The metadata of what a commit makes with these arguments. Raises Refused where they do not go together."""
    if check_transform(transform) is None:
        return metadata
    if dtype is not None:
        raise Refused("dtype is not for what a transform gives, such as its scales: let the function cast")
    said = copied(metadata)
    taken = [key for key in (NAME, VERSION) if key in said]
    if taken:
        raise Refused(f"metadata has {taken[0]!r}, which the transform says: leave it out")
    return {**said, **transform.labels}


def check_transform(transform: Any) -> Transform | None:
    """The same. Raises Refused for what is none."""
    if transform is None or isinstance(transform, Transform):
        return transform
    mend = "give weightvc.Transform(name, version, function)"
    raise Refused(f"transform={transform!r:.100} has no name and no version: {mend}")


def kept(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What of a version's metadata says which transform made its tensors."""
    return {key: metadata[key] for key in (NAME, VERSION) if key in metadata}


def detached(value: Any) -> Any:
    """The same tensor, with nothing that would record gradients."""
    return value.detach() if is_torch(value) else value


def _tensors(source: Source) -> Mapping[str, Any]:
    components: dict[str, dict[str, Any]] = {}
    for i, info in enumerate(source.tensors):
        if isinstance(source, MemorySource):
            value = detached(source.value(i))
        else:
            value = to_torch(info.dtype, info.shape, bytearray(source.read(i, 0, info.nbytes)))
        components.setdefault(info.component, {})[info.name] = value
    return components if any(components) else components.get("", {})

"""weightvc: git for model weights, on object storage.

    repository = weightvc.open("s3://bucket/policy")
    repository.commit(model, branch="main", message="step 121", step=121, dtype="bfloat16")
    weights = repository.load("main@{step=121}")

Importing this loads neither torch nor numpy: each part comes with its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weightvc.errors import (
    AccessDenied,
    BadFile,
    BadName,
    BadTensor,
    BranchMoved,
    Conflict,
    Corrupt,
    EngineError,
    Expired,
    Fenced,
    GroupNotReady,
    GroupSplit,
    KeyExists,
    KeyNotFound,
    NotFound,
    NotPublished,
    PreconditionFailed,
    QueueFull,
    RefNotFound,
    Refused,
    StateUnknown,
    StoreError,
    TensorNotFound,
    Unavailable,
    UnsafeStore,
    Unsupported,
    WeightvcError,
    WeightvcWarning,
)

if TYPE_CHECKING:
    from weightvc import dcp, engines, hooks
    from weightvc.auditing import Audit, audit
    from weightvc.client import Client, Timings, Update, Watch
    from weightvc.comparison import Diff, TensorDiff, diff
    from weightvc.doctor import Finding
    from weightvc.exporting import Export, Exported
    from weightvc.group import Group
    from weightvc.importing import Import, Imported
    from weightvc.mirroring import Mirror, mirror
    from weightvc.objects.retention import Policy, Rules
    from weightvc.objects.version import Edge, Version
    from weightvc.protocol.compact import Compacted
    from weightvc.protocol.fsck import FsckReport
    from weightvc.protocol.mirror import Mirrored
    from weightvc.protocol.plan import Plan
    from weightvc.protocol.rebuild import Rebuilt
    from weightvc.protocol.survey import Damage, Sufferer
    from weightvc.repository import Repository, fsck, init, open
    from weightvc.sources.transform import Transform
    from weightvc.targets import Slots, Target, Tensors
    from weightvc.worktree import Status, Verification

__version__ = "0.1.0"

_LAZY = {
    "Audit": "weightvc.auditing",
    "audit": "weightvc.auditing",
    "Client": "weightvc.client",
    "Timings": "weightvc.client",
    "Update": "weightvc.client",
    "Watch": "weightvc.client",
    "Export": "weightvc.exporting",
    "Exported": "weightvc.exporting",
    "Group": "weightvc.group",
    "Import": "weightvc.importing",
    "Imported": "weightvc.importing",
    "Slots": "weightvc.targets",
    "Target": "weightvc.targets",
    "Tensors": "weightvc.targets",
    "Diff": "weightvc.comparison",
    "TensorDiff": "weightvc.comparison",
    "diff": "weightvc.comparison",
    "Finding": "weightvc.doctor",
    "Compacted": "weightvc.protocol.compact",
    "Policy": "weightvc.objects.retention",
    "Rules": "weightvc.objects.retention",
    "Edge": "weightvc.objects.version",
    "Mirror": "weightvc.mirroring",
    "Mirrored": "weightvc.protocol.mirror",
    "mirror": "weightvc.mirroring",
    "Plan": "weightvc.protocol.plan",
    "Version": "weightvc.objects.version",
    "Damage": "weightvc.protocol.survey",
    "Rebuilt": "weightvc.protocol.rebuild",
    "FsckReport": "weightvc.protocol.fsck",
    "Repository": "weightvc.repository",
    "Sufferer": "weightvc.protocol.survey",
    "Transform": "weightvc.sources.transform",
    "fsck": "weightvc.repository",
    "init": "weightvc.repository",
    "open": "weightvc.repository",
    "Status": "weightvc.worktree",
    "Verification": "weightvc.worktree",
}

__all__ = [
    "AccessDenied",
    "Audit",
    "BadFile",
    "BadName",
    "BadTensor",
    "BranchMoved",
    "Client",
    "Compacted",
    "Conflict",
    "Corrupt",
    "Damage",
    "Diff",
    "Edge",
    "EngineError",
    "Expired",
    "Export",
    "Exported",
    "Fenced",
    "Finding",
    "FsckReport",
    "Group",
    "GroupNotReady",
    "GroupSplit",
    "Import",
    "Imported",
    "KeyExists",
    "KeyNotFound",
    "Mirror",
    "Mirrored",
    "NotFound",
    "NotPublished",
    "Plan",
    "Policy",
    "PreconditionFailed",
    "QueueFull",
    "Rebuilt",
    "RefNotFound",
    "Refused",
    "Repository",
    "Rules",
    "Slots",
    "StateUnknown",
    "Status",
    "StoreError",
    "Sufferer",
    "Target",
    "TensorDiff",
    "TensorNotFound",
    "Tensors",
    "Timings",
    "Transform",
    "Unavailable",
    "UnsafeStore",
    "Unsupported",
    "Update",
    "Verification",
    "Version",
    "Watch",
    "WeightvcError",
    "WeightvcWarning",
    "audit",
    "dcp",
    "diff",
    "engines",
    "fsck",
    "hooks",
    "init",
    "mirror",
    "open",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("dcp", "engines", "hooks"):
        return import_module(f"weightvc.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'weightvc' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value

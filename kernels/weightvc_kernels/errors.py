"""The one error of the kernels."""


class CodecError(ValueError):
    """A payload that no encoder wrote, or arguments that do not fit it. Nothing was changed.

    For a payload from storage it means corruption: fetch it again, or run fsck.
    """

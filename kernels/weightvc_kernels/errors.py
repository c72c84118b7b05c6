"""The one error of the kernels."""


class CodecError(ValueError):
    """A payload that no encoder wrote, or arguments that do not fit it. Nothing was changed.

    For a payload from storage it means corruption: fetch it again, or run fsck.
    """

    def __init__(self, text: str, job: int = 0) -> None:
        super().__init__(text)
        self.job = job
        """Where many blocks are decoded at once, which of them it is: those before it may have been written to."""

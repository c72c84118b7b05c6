"""What a user's typed code may say of the public names: mypy reads it, strictly, against the installed wheel."""

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import weightvc
import weightvc_cli.main
import weightvc_kernels
from weightvc import Client, Repository, Update, Version
from weightvc.errors import RefNotFound


def train(repository: Repository, weights: dict[str, npt.NDArray[np.uint16]]) -> Version:
    assert_type(weightvc.init("policy", exist_ok=True), Repository)
    made = repository.commit(weights, step=1, message="reward 0.71", metadata={"reward": 0.71}, codec="fast")
    assert_type(made, Version)
    assert_type(made.step, int | None)
    assert_type(repository.branches(), dict[str, str])
    assert_type([version.message for version in repository.log("main", 5)], list[str])
    assert_type(repository.diff("main~1", "main").density, float)
    assert_type(repository.gc(grace=3600).sequence, int)
    return made


def serve(url: str) -> str | None:
    with weightvc.open(url, lazy=True) as repository:
        try:
            assert_type(repository.load("main"), dict[str, Any])
            assert_type(repository.checkout("main", "served"), Version)
            assert_type(repository.verify("served").ok, bool)
        except RefNotFound as error:
            assert_type(error.exit_code, int)
        except weightvc.WeightvcError:
            raise
    client = Client(url, into="served")
    update = client.update("main")
    assert_type(update, Update)
    return update.activate().run


assert_type(weightvc_kernels.encode_whole(b"\x00\x00", 2), tuple[int, bytes])
weightvc_cli.main.main()

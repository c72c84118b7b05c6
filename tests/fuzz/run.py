"""Fuzz targets by coverage, with atheris, one process each.

    python -m tests.fuzz.run --seconds 60                   every target for a minute
    python -m tests.fuzz.run --seconds 600 stream           one for ten
    python -m tests.fuzz.run stream --input FILE            one input once, to see what it does

Corpora grow in .fuzz/TARGET; delete that to begin anew. An input that a target fails on is left there as crash-…,
and the exit status is 1. Make a test of it beside those of what it broke.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

HOME = Path(".fuzz")
LIMITS = ("-rss_limit_mb=3000", "-timeout=20", "-max_len=16384", "-detect_leaks=0", "-print_final_stats=1")
INSTRUMENTED = ["weightvc", "weightvc_kernels"]
_ALSO = ("context_sample", "context_vectors")
COMPILED = [
    f"weightvc_kernels.{path.stem}"
    for path in (Path(__file__).parents[2] / "kernels" / "weightvc_kernels").glob("*.py")
    if path.stem.endswith("_kernels") or path.stem in _ALSO
]
"""What numba compiles it has to see as it was written."""


def fuzz(name: str, seconds: int) -> None:
    """In a process of its own: never returns."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED, exclude=COMPILED):
        from tests.fuzz.targets import TARGETS
    corpus = HOME / name
    corpus.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed-{i:03}").write_bytes(seed)
    limits = [*LIMITS, f"-max_total_time={seconds}", f"-artifact_prefix={corpus}/"]
    atheris.Setup([sys.argv[0], *limits, str(corpus)], TARGETS[name].run)
    atheris.Fuzz()


def main() -> int:
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: 60)")
    parser.add_argument("--input", type=Path, help="run this file alone")
    arguments = parser.parse_args()
    names = arguments.targets or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"no target {', '.join(unknown)}: there are {', '.join(TARGETS)}")
    if arguments.input is not None:
        for name in names:
            TARGETS[name].run(arguments.input.read_bytes())
        return 0
    failed = False
    for name in names:
        HOME.mkdir(exist_ok=True)
        code = f"from tests.fuzz.run import fuzz; fuzz({name!r}, {arguments.seconds})"
        with (HOME / f"{name}.log").open("wb") as log:
            done = subprocess.run([sys.executable, "-c", code], stdout=log, stderr=subprocess.STDOUT)
        said = (HOME / f"{name}.log").read_text(errors="replace")
        count = re.search(r"number_of_executed_units: *(\d+)", said)
        result = "ok" if not done.returncode else f"failed, see {HOME / name}.log"
        print(f"{name}: {int(count[1]) if count else 0:,} executions, {result}", flush=True)
        failed |= done.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""What fingers that know git type, and what does it here."""

from typing import Final

COMMANDS: Final = {
    "add": "`weightvc commit PATH` takes all that lies there",
    "bisect": "`weightvc log --oneline`, then `weightvc checkout REF DIR` in the middle",
    "blame": "`weightvc diff REF~1 REF --stat` tells what a version changed",
    "cat-file": "`weightvc cat REF FILE`",
    "cherry-pick": "weights are not merged; `weightvc revert REF` makes a new version with those of REF",
    "clean": "`weightvc status DIR` names files that are no version's",
    "clone": "`weightvc checkout REF DIR` needs no copy of the repository; `weightvc mirror` makes one",
    "config": "options and environment variables say all: `weightvc --help`",
    "describe": "`weightvc show REF`",
    "fetch": "`weightvc pull REF --into DIR` fetches",
    "ls-files": "`weightvc ls REF --files`",
    "ls-tree": "`weightvc ls REF`",
    "merge": "weights are not merged; `weightvc commit --parent REF` records a further parent",
    "prune": "`weightvc gc` frees what nothing refers to",
    "push": "`weightvc commit` has published already",
    "rebase": "`weightvc commit --rebase` goes on top of a branch that moved",
    "remote": "`-r URL` or WEIGHTVC_REPO names the repository",
    "repack": "`weightvc compact`",
    "restore": "`weightvc pull REF --into DIR` puts changed files right",
    "rev-parse": "`weightvc show REF`",
    "rm": "`weightvc commit` takes what lies in the directory, and no more",
    "stash": "`weightvc commit --detach --parent REF PATH` keeps weights on no branch",
    "switch": "`weightvc checkout REF DIR`",
    "whatchanged": "`weightvc log`",
}
"""Commands of git that are none here."""

OPTIONS: Final = {
    ("branch", "-D"): "`weightvc branch -d NAME` deletes a branch, whose versions stay until they expire",
    ("branch", "-a"): "`weightvc branch` lists all of them",
    ("branch", "-l"): "`weightvc branch` lists all of them",
    ("branch", "-m"): "make one of the new name, `weightvc branch NEW OLD`, and then `weightvc branch -d OLD`",
    ("branch", "-v"): "`weightvc log --oneline --all` has versions and the branches that point at them",
    ("checkout", "-b"): "`weightvc branch NAME REF` makes a branch",
    (
        "commit",
        "--amend",
    ): "a version never changes: commit anew, then `weightvc reset BRANCH REF --rewind` drops the old",
    ("commit", "-a"): "all that lies at PATH is committed",
    ("init", "--bare"): "a repository never has a working tree",
    ("log", "--follow"): "`weightvc follow BRANCH --into DIR`",
    ("log", "--stat"): "`weightvc diff REF~1 REF --stat`",
    ("log", "-p"): "`weightvc diff REF~1 REF`",
    (
        "reset",
        "--hard",
    ): "no directory is touched: `weightvc reset BRANCH REF --rewind`, then `weightvc pull BRANCH --into DIR`",
    ("show", "--stat"): "`weightvc diff REF~1 REF --stat`",
    ("tag", "-l"): "`weightvc tag` lists all of them",
}
"""Options of git that are none here, by command."""

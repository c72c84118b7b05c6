import json

from tests.cli.conftest import Shell


def test_branches(shell: Shell, history: dict[str, str]) -> None:
    assert shell.out("branch") == f"  exp  {history['exp1'][:12]}\n* main {history['merge'][:12]}\n"
    shell.run("branch", "fix", "main~1")
    assert {b["name"]: b["id"] for b in shell.json("branch")}["fix"] == history["main1"]
    assert "exists" in shell.fails(4, "branch", "fix")
    shell.run("branch", "--default", "fix")
    assert [b["name"] for b in shell.json("branch") if b["default"]] == ["fix"]
    assert shell.json("show")["id"] == history["main1"]
    shell.run("branch", "--default", "main")
    assert shell.json("branch", "-d", "fix") == {"deleted": "fix", "id": history["main1"]}
    assert "no branch" in shell.fails(3, "branch", "-d", "fix")
    shell.fails(3, "branch", "--default", "fix")
    shell.fails(2, "branch", "one", "--delete", "two")


def test_tags(shell: Shell, history: dict[str, str]) -> None:
    assert shell.out("tag") == f"v1 {history['exp1'][:12]}\n"
    assert "--force" in shell.fails(4, "tag", "v1", "main")
    shell.run("tag", "v1", "main", "--force")
    assert shell.json("tag") == [{"name": "v1", "id": history["merge"]}]
    shell.run("tag", "-d", "v1")
    assert shell.json("tag") == []
    # A deleted tag's name is not given to another version by mistake.
    shell.fails(4, "tag", "v1", "exp")
    shell.run("tag", "v1", "main")
    shell.fails(3, "tag", "-d", "nothing")


def test_reset_goes_back_only_when_told(shell: Shell, history: dict[str, str]) -> None:
    assert "--rewind" in shell.fails(8, "reset", "main", "main~1")
    shell.fails(4, "reset", "main", "main~1", "--rewind", "--expect", "exp")
    assert shell.json("branch")[1]["id"] == history["merge"]
    assert shell.json("reset", "main", "main~1", "--rewind", "--expect", history["merge"])["id"] == history["main1"]
    assert shell.json("branch")[1]["id"] == history["main1"]
    shell.run("reset", "main", history["merge"])  # forward needs no rewind
    shell.fails(3, "reset", "nothing", "main")


def test_revert_goes_forward_to_old_weights(shell: Shell, history: dict[str, str]) -> None:
    old = shell.json("show", "main~1")
    made = shell.json("revert", "main~1")
    assert made["parents"] == [history["merge"]]
    assert made["tree"] == old["tree"]
    assert made["branch"] == "main"
    assert shell.json("show")["message"] == f"revert to {history['main1'][:12]}: message 1"
    again = shell.run("revert", "v1", "-b", "exp", "-m", "again", "--json")
    assert json.loads(again.stdout)["changed"] == 0
    assert "had these weights already" in json.loads(again.stderr)["note"]
    assert shell.json("show", "exp")["message"] == "again"


def test_names_that_some_store_could_not_keep_are_refused(shell: Shell, history: dict[str, str]) -> None:
    for name in (
        "a//b",
        ".",
        "..",
        "a\\b",
        "a\nb",
        "e\u0301",
        "\u00e9",
        "x.lock",
        "HEAD",
        "-x",
        "0" * 64,
        "a/",
        "x" * 121,
    ):
        message = shell.fails(8, "branch", "--", name)
        assert "branch" in message
        assert "\n" not in message
    shell.fails(8, "tag", "--", "a..b")
    shell.fails(8, "commit", "0.safetensors", "-b", "a//b")
    shell.run("branch", "exp/1")
    shell.run("branch", "EXP")
    heads = {b["name"]: b["id"] for b in shell.json("branch")}
    assert heads["exp"] == history["exp1"]
    assert heads["exp/1"] == heads["EXP"] == history["merge"]


def test_the_default_branch_is_not_deleted(shell: Shell, history: dict[str, str]) -> None:
    assert "--default" in shell.fails(8, "branch", "-d", "main")
    shell.run("branch", "--default", "exp")
    shell.run("branch", "-d", "main")
    assert shell.json("show")["id"] == history["exp1"]


def test_tags_and_branches_share_no_name(shell: Shell, history: dict[str, str]) -> None:
    assert "is a branch" in shell.fails(4, "tag", "exp", "main", "--force")
    assert "is a tag" in shell.fails(4, "branch", "v1")
    assert "is a tag" in shell.fails(4, "commit", "1.safetensors", "-b", "v1")
